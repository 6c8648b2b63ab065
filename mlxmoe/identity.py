"""Which model this is, so that a state made by another one is not taken for its own. Knows files, no MLX.

The digest covers what makes the numbers: config.json, the model's own code if it brings any, every tensor's name,
dtype and shape, and a page from the middle of each tensor; of an adapter the same. Reading all of a model that is
larger than memory would take minutes. A page of each tensor tells fine-tunes of one model apart, which have the same
headers; an edit by hand that leaves all those pages alone is not noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxmoe.errors import CheckpointError, SavedStateError
from mlxmoe.experts.safetensors import FileState, TensorInfo, read_checkpoint, read_header

SAMPLE_BYTES = 4096  # of each tensor: what the drive reads at least


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """`name`: hub id or folder; `revision`: the hub's commit, None for a folder; `adapter`: its folder's name.

    `mlx_lm`: the version whose definition and caches are used. `digest`: of the model's content.
    """

    name: str
    revision: str | None
    adapter: str | None
    mlx_lm: str
    digest: str

    def __str__(self) -> str:
        revision = f" at revision {self.revision}" if self.revision else ""
        adapter = f" with adapter {self.adapter}" if self.adapter else ""
        return f"{self.name}{revision}{adapter} ({self.digest[:12]})"

    @property
    def content(self) -> dict[str, str]:
        """What tells it from any other, wherever it lies and whatever it is called."""
        return {"digest": self.digest, "mlx_lm": self.mlx_lm}

    def refuse_other(self, saved: Mapping[str, Any], path: Path) -> None:
        """Raise SavedStateError if the identity that `path` names, `saved`, is not this one; names may differ."""
        try:
            other = ModelIdentity(**saved)
            name = str(other)
        except TypeError:
            raise SavedStateError(
                f"{path} names the model it was saved with in a way that is not known here ({saved}). Read it with "
                f"the mlxmoe that wrote it, or begin anew."
            ) from None
        if other.digest != self.digest:
            raise SavedStateError(
                f"{path} was saved with {name}, but the model loaded is {self}. Load the model that it "
                f"was saved with."
            )
        if other.mlx_lm != self.mlx_lm:
            raise SavedStateError(
                f"{path} was saved with mlx-lm {other.mlx_lm}, and mlx-lm {self.mlx_lm} is installed, whose caches "
                f"may differ. Install mlx-lm {other.mlx_lm}, or begin anew."
            )


def source_states(folder: Path, adapter: Path | None) -> dict[Path, FileState]:
    """The states of the files beside the weights that make a model's numbers, as far as they are there."""
    files = [folder / "config.json"]
    try:
        if code := json.loads(files[0].read_bytes()).get("model_file"):
            files.append(folder / code)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        pass  # whoever loads the model says what is wrong with it
    if adapter is not None:
        files += [adapter / "adapter_config.json", adapter / "adapters.safetensors"]
    return {file: FileState.at(file) for file in files if file.is_file()}


def identify(folder: Path, adapter: Path | None, loaded: Mapping[Path, FileState]) -> ModelIdentity:
    """The identity of the model in `folder`. `loaded`: the states of its weight files and `source_states` at load.

    Raises CheckpointError if they have changed since, or cannot be read.
    """
    checkpoint = read_checkpoint(folder)
    digest = hashlib.sha256()
    try:
        config = json.loads((folder / "config.json").read_bytes())
        digest.update(json.dumps(config, sort_keys=True).encode())
        if code := config.get("model_file"):
            digest.update((folder / code).read_bytes())
        _sample(checkpoint.tensors.values(), digest)
        if adapter is not None:
            digest.update((adapter / "adapter_config.json").read_bytes())
            _sample(read_header(adapter / "adapters.safetensors")[1].values(), digest)
        # last: what is now as it was then was so in between
        now = {**{file: FileState.at(file) for file in checkpoint.files}, **source_states(folder, adapter)}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"The files of {folder} cannot be read any more: {error}. Load it again.") from error
    if changed := [file for file in {**loaded, **now} if loaded.get(file) != now.get(file)]:
        raise CheckpointError(f"{changed[0]} has changed since the model was loaded. Load it again.")
    name, revision = _name(folder)
    return ModelIdentity(name, revision, adapter.name if adapter else None, version("mlx-lm"), digest.hexdigest())


class FolderIdentity:
    """The identity of the model in a folder, computed when it is first asked for, and once for the same files."""

    def __init__(self, folder: Path, adapter: Path | None) -> None:
        self.folder = folder
        self.adapter = adapter
        self._known: tuple[dict[Path, FileState], ModelIdentity] | None = None

    def of(self, loaded: Mapping[Path, FileState]) -> ModelIdentity:
        """Of the model that was made from files in these states, as `identify` says it; raises as it does."""
        if self._known is None or self._known[0] != loaded:
            self._known = dict(loaded), identify(self.folder, self.adapter, loaded)
        return self._known[1]

    def now(self) -> ModelIdentity:
        """As the files lie there now. Raises ModelError."""
        return self.of({**source_states(self.folder, self.adapter), **read_checkpoint(self.folder).files})


def _sample(tensors: Iterable[TensorInfo], digest: Any) -> None:
    """Tell `digest` of each tensor, by name, whatever file it is in and wherever it lies there."""
    opened: dict[Path, int] = {}
    try:
        for tensor in sorted(tensors, key=lambda tensor: tensor.name):
            if tensor.file not in opened:
                opened[tensor.file] = os.open(tensor.file, os.O_RDONLY)
            middle = max(0, tensor.nbytes - SAMPLE_BYTES) // 2
            page = os.pread(opened[tensor.file], min(tensor.nbytes, SAMPLE_BYTES), tensor.offset + middle)
            digest.update(json.dumps([tensor.name, tensor.dtype, tensor.shape, len(page)]).encode() + page)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _name(folder: Path) -> tuple[str, str | None]:
    """The hub's id and commit, where `folder` is a snapshot in its cache; else the folder's name."""
    repo = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repo.startswith("models--"):
        return repo.removeprefix("models--").replace("--", "/"), folder.name
    return folder.name, None
