"""What `mlxmoe tune` found best for a model on this machine, kept for later loads. Knows files, not how it was found.

One small file for each model and machine, in the user's cache folder, written by `mlxmoe tune` alone. It decides
what a load takes where its caller says nothing. A tuning of another model, machine or version, and a torn one, is not
used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxmoe.errors import RequestError, SavedStateError
from mlxmoe.identity import FolderIdentity, ModelIdentity
from mlxmoe.keeping import NO_USE, keep, kept, user_cache
from mlxmoe.kv.settings import KVSettings
from mlxmoe.memory.reading import Reading
from mlxmoe.memory.sizes import format_bytes
from mlxmoe.memory.sources import Sources

FORMAT = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TunedMachine:
    """A machine as far as speed depends on it. `total_bytes`: of memory, or of the control group's limit."""

    chip: str
    total_bytes: int

    def __str__(self) -> str:
        return f"{self.chip} with {format_bytes(self.total_bytes)}"


def this_machine(reading: Reading) -> TunedMachine:
    """The machine that `reading` is of."""
    chip = Sources().chip_brand() or platform.processor() or platform.machine()
    return TunedMachine(chip.removeprefix("Apple "), reading.total_bytes)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a load takes where its caller says nothing: each None where what fits is best.

    `experts`: bytes of slots, at most. `context`: tokens. `chunk_tokens`: of prefill at a time. `model`: its name,
    for people; `digest`: of its content, and `mlx_lm`: the version that ran it. `kv`: the caches that it holds for.
    `goal`: what was asked for. `tokens_per_s`: measured with these, with the context full.
    """

    model: str
    digest: str
    mlx_lm: str
    machine: TunedMachine
    kv: KVSettings
    experts: int | None
    context: int | None
    chunk_tokens: int | None
    goal: str
    tokens_per_s: float

    def __post_init__(self) -> None:
        for name in ("experts", "context", "chunk_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"its {name} is {value!r}")
        if not isinstance(self.tokens_per_s, float) or not self.tokens_per_s > 0:
            raise ValueError(f"its rate is {self.tokens_per_s!r}")

    @property
    def arguments(self) -> dict[str, int]:
        """What it says, as arguments of `load`."""
        said = {"context": self.context, "experts": self.experts, "chunk_tokens": self.chunk_tokens}
        return {name: value for name, value in said.items() if value is not None}

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.arguments.items()) or "what fits"
        return f"{said}; {self.tokens_per_s:.1f} tokens/s were measured on {self.machine}, goal {self.goal}"


class TuningFolder:
    """Where tunings are kept; by default a folder of the user's cache, which is made when one is written."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = user_cache() / "mlxmoe" / "tunings" if path is None else path

    def keep(self, tuning: Tuning, model: Path) -> Path:
        """Write `tuning` of the model in folder `model` in the place of an older one. Raises SavedStateError."""
        file = self.path / f"{_config_key(model)}-{tuning.digest[:32]}-{_machine_key(tuning.machine)}.json"
        return keep(file, asdict(tuning), FORMAT, what="tuning", without="mlxmoe tune --no-save")

    def find(self, model: FolderIdentity, machine: TunedMachine, kv: KVSettings) -> tuple[Tuning, Path] | None:
        """The tuning of `model`, and its file; None without one.

        Where there is one that is of no use the log says why. Reads the model only where there may be one. Raises
        CheckpointError for a model that cannot be read.
        """
        others = self._of_such(model.folder)
        if not others:
            return None
        identity = model.now()
        mine = [file for file in others if f"-{identity.digest[:32]}-" in file.name]
        if not mine:
            logger.info("%s holds a tuning of a model with the same config, not of this one.", self.path)
            return None
        wanted = next((file for file in mine if file.stem.endswith(_machine_key(machine))), None)
        if wanted is None:
            logger.info("%s is of another machine than %s, and is ignored. Tune here: mlxmoe tune.", mine[0], machine)
            return None
        try:
            return _read(wanted, identity, machine, kv), wanted
        except NO_USE as error:
            logger.warning("The tuning %s is ignored: %s. Make it anew: mlxmoe tune.", wanted, error)
            return None

    def may_know(self, model: Path) -> bool:
        """Whether there is a tuning of a model with the same config as the one in folder `model`."""
        return bool(self._of_such(model))

    def forget(self, model: Path) -> int:
        """Remove the tunings of the model in folder `model`, of all machines; how many there were.

        Raises SavedStateError where one cannot be removed, CheckpointError for a model that cannot be read.
        """
        others = self._of_such(model)
        digest = FolderIdentity(model, None).now().digest[:32] if others else ""
        mine = [file for file in others if f"-{digest}-" in file.name]
        for file in mine:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise SavedStateError(f"{file} cannot be removed: {error.strerror or error}.") from error
        return len(mine)

    def _of_such(self, model: Path) -> list[Path]:
        """Files of models with the same config."""
        if not self.path.exists():  # sooner said than a config is read
            return []
        try:
            return sorted(self.path.glob(f"{_config_key(model)}-*.json"))
        except (OSError, ValueError, RecursionError):  # whoever loads the model says what is wrong with its config
            return []


def find_tuning(model: FolderIdentity, reading: Reading, kv: KVSettings) -> Tuning | None:
    """The tuning that a load of `model` is to use on the machine that `reading` is of; the log names it."""
    try:
        folder = TuningFolder()
        found = folder.find(model, this_machine(reading), kv) if folder.may_know(model.folder) else None
    except RequestError as error:  # of a user without a home folder
        logger.info("No tuning: %s", error)
        return None
    if found is None:
        return None
    tuning, file = found
    logger.info("Tuned by %s: %s. load(..., tuned=False) goes without.", file, tuning)
    return tuning


def _config_key(model: Path) -> str:
    config = json.loads((model / "config.json").read_bytes())
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def _machine_key(machine: TunedMachine) -> str:
    return hashlib.sha256(json.dumps([machine.chip, machine.total_bytes]).encode()).hexdigest()[:8]


def _read(file: Path, identity: ModelIdentity, machine: TunedMachine, kv: KVSettings) -> Tuning:
    """Raises ValueError with the reason where it is not to be used."""
    stored = kept(file, FORMAT)
    of_machine, of_kv = TunedMachine(**stored.pop("machine")), KVSettings(**stored.pop("kv"))
    tuning = Tuning(machine=of_machine, kv=of_kv, **stored)
    for reason in _misfits(tuning, identity, machine, kv):
        raise ValueError(reason)
    return tuning


def _misfits(tuning: Tuning, identity: ModelIdentity, machine: TunedMachine, kv: KVSettings) -> Iterator[str]:
    if tuning.digest != identity.digest:
        yield f"it is of another model, {tuning.model}"
    if tuning.mlx_lm != identity.mlx_lm:
        yield f"it was made with mlx-lm {tuning.mlx_lm}, and {identity.mlx_lm} is installed"
    if tuning.machine != machine:
        yield f"it is of another machine, {tuning.machine}"
    if tuning.kv != kv and (tuning.kv.lossless, kv.lossless) != (True, True):  # sinks alone mean nothing
        yield f"it holds for other caches, {_said(asdict(tuning.kv))}, not for {_said(asdict(kv))}"


def _said(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
