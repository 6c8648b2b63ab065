"""A model's routing profile: how often each expert was asked for, kept from one process to the next.

One small file for each model, in the user's cache folder, written by `mlxmoe profile` alone: what is said to a model
leaves no trace on disk unasked. It decides how many slots each layer gets and which experts fill them first, and so
nothing but speed. Knows files, not MLX.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from mlxmoe.experts.routing import routing_stats
from mlxmoe.experts.trace import Trace
from mlxmoe.keeping import NO_USE, keep, kept, user_cache
from mlxmoe.memory.experts import MoeLayer

FORMAT = 1

# Tokens for each layer, from which on its hits at every number of slots say something of other texts: the shortest
# recordings that did (docs/notebook.md).
CURVE_TOKENS = 256

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoutingProfile:
    """`model`: its name, for people. `digest`: of its content. `counts[path][e]`: uses of expert `e` of a layer.

    `hit_rates[path][n]`: share of a layer's uses that hit in an LRU of `n` slots, from none to one for each expert;
    empty where too few tokens were seen. Raises ValueError for numbers that cannot be.
    """

    model: str
    digest: str
    tokens: int
    counts: Mapping[str, Sequence[int]]
    hit_rates: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = [count for counts in self.counts.values() for count in counts]
        if not all(type(count) is int and count >= 0 for count in [*numbers, self.tokens]):
            raise ValueError("a count is no whole number")
        if self.hit_rates and self.hit_rates.keys() != self.counts.keys():
            raise ValueError("its hit rates are of other layers")
        for path, rates in self.hit_rates.items():
            if len(rates) != len(self.counts[path]) + 1:
                raise ValueError(f"{path} has {len(rates)} hit rates for {len(self.counts[path])} experts")
            if not all(0 <= low <= high <= 1 for low, high in pairwise(rates)):
                raise ValueError(f"the hit rates of {path} are no shares that rise")

    @classmethod
    def of(cls, trace: Trace, layers: Sequence[MoeLayer], *, model: str, digest: str) -> RoutingProfile:
        """Of what was recorded. Raises ValueError for the trace of a model with other layers."""
        if trace.num_experts != (shape := tuple(layer.num_experts for layer in layers)):
            raise ValueError(f"the trace is of layers with {trace.num_experts} experts, the model's have {shape}")
        paths, counts = [layer.path for layer in layers], trace.counts()
        hit_rates = {}
        if all(sum(uses) >= CURVE_TOKENS * layer.top_k for uses, layer in zip(counts, layers, strict=True)):
            hit_rates = {
                path: [round(rate, 6) for rate in layer.hit_rates]
                for path, layer in zip(paths, routing_stats(trace).layers, strict=True)
            }
        return cls(model, digest, trace.tokens, dict(zip(paths, counts, strict=True)), hit_rates)

    def order(self, path: str) -> list[int]:
        """The experts of a layer, the most used first; those used equally often in their order."""
        counts = self.counts[path]
        return sorted(range(len(counts)), key=lambda expert: -counts[expert])

    def with_hit_rates(self, layers: Sequence[MoeLayer]) -> tuple[MoeLayer, ...]:
        """`layers` with what is known of their hits."""
        return tuple(replace(layer, hit_rates=tuple(self.hit_rates.get(layer.path, ()))) for layer in layers)


class ProfileFolder:
    """Where profiles are kept; by default a folder of the user's cache, which is made when one is written."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = user_cache() / "mlxmoe" / "profiles" if path is None else path

    def keep(self, profile: RoutingProfile, layers: Sequence[MoeLayer]) -> Path:
        """Write `profile` in the place of an older one of the same model. Raises SavedStateError."""
        file = self._file(profile.digest, layers)
        return keep(file, asdict(profile), FORMAT, what="profile", without="mlxmoe profile --no-save")

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
        except NO_USE as error:
            logger.warning(
                "The routing profile %s is of no use (%s) and is ignored. Make it anew: mlxmoe profile.", file, error
            )
            return None

    def _file(self, digest: str, layers: Sequence[MoeLayer]) -> Path:
        return self.path / f"{_shape_key(layers)}-{digest[:32]}.json"


def _shape_key(layers: Sequence[MoeLayer]) -> str:
    shape = [[layer.path, layer.num_experts] for layer in layers]
    return hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]


def _read(file: Path, digest: str, layers: Sequence[MoeLayer]) -> RoutingProfile:
    profile = RoutingProfile(**kept(file, FORMAT))
    if profile.digest != digest:
        raise ValueError(f"it is of another model, {profile.model}")
    shape = {path: len(counts) for path, counts in profile.counts.items()}
    if shape != {layer.path: layer.num_experts for layer in layers}:
        raise ValueError("it is of other layers")
    return profile
