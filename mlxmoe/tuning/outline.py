"""From what the user calls a model to a folder that can be opened: its own, or a skeleton of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlxmoe.errors import DownloadError, ModelError
from mlxmoe.experts.safetensors import read_checkpoint
from mlxmoe.hub import fetch_outline, find_cached, is_hub_id, resolve
from mlxmoe.opening import read_config, read_config_file
from mlxmoe.tuning.skeleton import write_from_config, write_headers


@dataclass(frozen=True)
class Outline:
    """A folder to open in a model's stead. `weights`: where its sizes are from."""

    name: str
    folder: Path
    weights: Literal["files", "headers", "config"]


@contextmanager
def outlined(model: str | Path | None, revision: str | None, bits: int | None) -> Iterator[Outline]:
    """The model's folder if it has weights, or one with holes for weights, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="mlxmoe-plan-") as temporary:
        skeleton = Path(temporary) / "model"
        skeleton.mkdir()
        file = Path(model).expanduser() if model is not None else None
        if file is not None and file.suffix == ".json" and file.is_file():
            write_from_config(skeleton, read_config_file(file), bits)
            yield Outline(str(file), skeleton, "config")
            return
        if model is not None and is_hub_id(model):
            yield _of_hub(str(model), revision, bits, skeleton)
            return
        folder = resolve(model, revision)
        name = "built-in demo model" if model is None else str(folder)
        yield _of_folder(name, folder, bits, skeleton)


def _of_folder(name: str, folder: Path, bits: int | None, skeleton: Path) -> Outline:
    config = read_config(folder)
    if bits is None and (any(folder.glob("model*.safetensors")) or any(folder.glob("*.gguf"))):
        return Outline(name, folder, "files")
    write_from_config(skeleton, config, bits)
    return Outline(name, skeleton, "config")


def _of_hub(repo: str, revision: str | None, bits: int | None, skeleton: Path) -> Outline:
    cached = find_cached(repo, revision)
    if cached is not None and _is_whole(cached):
        return _of_folder(repo, cached, bits, skeleton)
    try:
        headers = fetch_outline(repo, revision, skeleton)
    except DownloadError as error:
        raise DownloadError(
            f"{error} A config.json alone needs no network: mlxmoe plan path/to/config.json"
        ) from error
    if bits is None and headers:
        write_headers(skeleton, headers)
        return Outline(repo, skeleton, "headers")
    write_from_config(skeleton, read_config(skeleton), bits)
    return Outline(repo, skeleton, "config")


def _is_whole(folder: Path) -> bool:
    try:
        read_config(folder)
        read_checkpoint(folder)
    except ModelError:
        return False
    return True
