"""A model's routing profile: how often each expert was asked for, kept from one process to the next.

One small file for each model, in the user's cache folder, written by `mlxmoe profile` alone: what is said to a model
leaves no trace on disk unasked. It decides which experts a bank is filled with first, and so nothing but speed. Knows
files, not MLX.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mlxmoe.errors import RequestError, SavedStateError
from mlxmoe.experts.trace import Trace
from mlxmoe.memory.plan import MoeLayer
from mlxmoe.writing import replacing

FORMAT = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoutingProfile:
    """`model`: its name, for people. `digest`: of its content. `counts[path][e]`: uses of expert `e` of a layer."""

    model: str
    digest: str
    tokens: int
    counts: Mapping[str, Sequence[int]]

    def __post_init__(self) -> None:
        numbers = [count for counts in self.counts.values() for count in counts]
        if not all(type(count) is int and count >= 0 for count in [*numbers, self.tokens]):
            raise ValueError("a count is no whole number")

    @classmethod
    def of(cls, trace: Trace, layers: Sequence[MoeLayer], *, model: str, digest: str) -> RoutingProfile:
        """Of what was recorded. Raises ValueError for the trace of a model with other layers."""
        if trace.num_experts != (shape := tuple(layer.num_experts for layer in layers)):
            raise ValueError(f"the trace is of layers with {trace.num_experts} experts, the model's have {shape}")
        return cls(model, digest, trace.tokens, dict(zip((m.path for m in layers), trace.counts(), strict=True)))

    def order(self, path: str) -> list[int]:
        """The experts of a layer, the most used first; those used equally often in their order."""
        counts = self.counts[path]
        return sorted(range(len(counts)), key=lambda expert: -counts[expert])


class ProfileFolder:
    """Where profiles are kept; by default a folder of the user's cache, which is made when one is written."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = user_cache() / "mlxmoe" / "profiles" if path is None else path

    def keep(self, profile: RoutingProfile, layers: Sequence[MoeLayer]) -> Path:
        """Write `profile` in the place of an older one of the same model. Raises SavedStateError."""
        file = self._file(profile.digest, layers)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file, durable=False) as out:
                out.write(json.dumps({"format": FORMAT, **asdict(profile)}).encode())
        except OSError as error:
            raise SavedStateError(
                f"The profile cannot be kept as {file}: {error.strerror or error}. Make room there, or go without: "
                f"mlxmoe profile --no-save."
            ) from error
        return file

    def find(self, layers: Sequence[MoeLayer], digest: Callable[[], str]) -> RoutingProfile | None:
        """The profile of the model with `layers`; None without one, and with a logged reason if it is of no use.

        `digest`: asked for only where there are profiles of models with such layers, as it takes reading.
        """
        try:
            others = sorted(self.path.glob(f"{_shape_key(layers)}-*.json"))
        except OSError:  # the folder is there and may not be listed
            others = []
        if not others:
            return None
        file = self._file(wanted := digest(), layers)
        if file not in others:
            logger.info("%s holds a routing profile of another model with the same layers, not of this.", self.path)
            return None
        try:
            return _read(file, wanted, layers)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            logger.warning(
                "The routing profile %s is of no use (%s) and is ignored. Make it anew: mlxmoe profile.", file, error
            )
            return None

    def _file(self, digest: str, layers: Sequence[MoeLayer]) -> Path:
        return self.path / f"{_shape_key(layers)}-{digest[:32]}.json"


def user_cache() -> Path:
    """The folder for what programs can make again: as the XDG base directories say, ~/Library/Caches on macOS.

    Raises RequestError for a user without a home folder.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the specification has relative ones ignored
        return Path(named)
    try:
        return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    except RuntimeError as error:
        raise RequestError("This user has no home folder to keep anything in. Set XDG_CACHE_HOME to one.") from error


def _shape_key(layers: Sequence[MoeLayer]) -> str:
    shape = [[layer.path, layer.num_experts] for layer in layers]
    return hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]


def _read(file: Path, digest: str, layers: Sequence[MoeLayer]) -> RoutingProfile:
    stored = json.loads(file.read_bytes())
    if (version := stored.pop("format")) != FORMAT:
        raise ValueError(f"it is in version {version} of the format, and {FORMAT} is read here")
    profile = RoutingProfile(**stored)
    if profile.digest != digest:
        raise ValueError(f"it is of another model, {profile.model}")
    shape = {path: len(counts) for path, counts in profile.counts.items()}
    if shape != {layer.path: layer.num_experts for layer in layers}:
        raise ValueError("it is of other layers")
    return profile
