"""Everything that is looked at, gathered: of the machine and, where one is named, of a model's files on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxmoe.doctor.disk import Disk
from mlxmoe.doctor.machine import Machine
from mlxmoe.doctor.read_rate import ReadRate, measure_read_rate
from mlxmoe.errors import CheckpointError, ModelError, brief
from mlxmoe.experts.safetensors import read_checkpoint
from mlxmoe.hub import cache_folder
from mlxmoe.memory.chips import Chip, find_chip
from mlxmoe.memory.reading import MemoryReader, Reading, usable_bytes
from mlxmoe.opening import read_config


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's weights on disk: their bytes and number of files. `problem`: why they cannot be read, if so.

    `rate`: None where it was not measured, for such a problem or because the model is too small to tell.
    """

    path: str
    nbytes: int
    files: int
    disk: Disk
    rate: ReadRate | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Facts:
    """The machine. `platform`: as `sys.platform`; `bandwidth`: the chip's, where the table has it.

    `gpu`: whether MLX computes on one. `usable_bytes`: what an engine could take now. `wired_limit_bytes`: what
    somebody set for the GPU, None where macOS' default holds. `open_files`: how many this process may have.
    `unmet`: requirements that the installed packages do not meet. `cache_*`: the folder where downloads go.
    """

    platform: str
    system: str
    chip: str
    bandwidth: Chip | None
    gpu: bool
    reading: Reading
    usable_bytes: int
    wired_limit_bytes: int | None
    open_files: int
    versions: Mapping[str, str]
    unmet: tuple[str, ...]
    cache_folder: str
    cache_disk: Disk
    cache_free_bytes: int | None
    model: ModelFacts | None

    @property
    def streams(self) -> bool:
        """Whether the model's weights are more than an engine could take now, so that experts come from its disk."""
        return self.model is not None and self.model.nbytes > self.usable_bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def gather(machine: Machine, reader: MemoryReader, model: Path | None) -> Facts:
    """Ask `machine` and `reader` everything, and read from the files of the model in folder `model`."""
    chip, cache, reading = machine.chip(), cache_folder(), reader.read()
    return Facts(
        platform=machine.platform,
        system=machine.system(),
        chip=chip,
        bandwidth=find_chip(chip),
        gpu=machine.has_gpu(),
        reading=reading,
        usable_bytes=usable_bytes(reading),
        wired_limit_bytes=machine.wired_limit_bytes(),
        open_files=machine.open_files_limit(),
        versions=machine.versions(),
        unmet=machine.unmet_requirements(),
        cache_folder=str(cache),
        cache_disk=machine.disk(cache),
        cache_free_bytes=machine.free_bytes(cache),
        model=None if model is None else _look_at_model(machine, model),
    )


def _look_at_model(machine: Machine, folder: Path) -> ModelFacts:
    try:
        checkpoint = read_checkpoint(folder)
        if not checkpoint.tensors:
            raise CheckpointError(f"The weights of {folder} hold no tensor. Download the model again.")
    except ModelError as error:
        return ModelFacts(str(folder), 0, 0, machine.disk(folder), None, str(error))
    file = next(iter(checkpoint.files))  # a download is a folder of links: the files lie where they point to
    rate, problem = None, None
    try:
        rate = measure_read_rate(checkpoint, machine.bytes_from_disk)
    except OSError as error:
        problem = f"Reading the weights of {folder} failed: {brief(error)}"
    try:
        read_config(folder)
    except ModelError as error:
        problem = problem or str(error)
    return ModelFacts(str(folder), checkpoint.nbytes, len(checkpoint.files), machine.disk(file), rate, problem)
