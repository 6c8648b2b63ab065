"""Writes a model folder that appears whole or not at all: tensors one by one, the index, the rename.

Owns the safetensors bytes, the disk check and the rule that nothing is overwritten by surprise.
Knows nothing of what the tensors mean.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

DTYPE_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint8: "U8",
    mx.uint32: "U32",
}


class FolderError(Exception):
    """The folder must not be written: it is in use, or the disk is too small."""


@contextmanager
def new_folder(folder: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a folder beside `folder` to write in; rename it to `folder` once the block ends well.

    After an exception nothing new is left, and `folder` is as it was. With `force`, a model folder that is
    there gives way to the new one.
    Raises FolderError where `folder` holds anything and `force` was not given, or is no model folder.
    """
    folder = folder.resolve()
    _refuse_overwriting(folder, force)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        _rename_over(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rename_over(partial: Path, folder: Path) -> None:
    """Rename `partial` to `folder`; what is there steps aside, and comes back should the rename fail."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    try:
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _refuse_overwriting(folder: Path, force: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FolderError(f"{folder} is a file; name a folder that can be made.")
    if not any(folder.iterdir()):
        return
    if not force:
        raise FolderError(f"{folder} is not empty. Name another folder, or give --force to replace it.")
    if not (folder / "config.json").exists():
        raise FolderError(f"{folder} has no config.json, so it is no model folder: --force leaves it alone.")


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raise FolderError unless the disk of `folder` has `needed_bytes` and 5 % more."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes * 1.05:
        raise FolderError(
            f"The model needs {needed_bytes / 1e9:.2f} GB, {folder} has {free_bytes / 1e9:.2f} GB free."
        )


def write_weights(folder: Path, tensors: dict[str, mx.array], *, shards: int = 1) -> int:
    """Write lazy `tensors` in their order to `shards` safetensors files and an index; return their bytes.

    Empties `tensors`: each array is evaluated, written and dropped before the next one, so that no more
    than one array (and what shares its graph) is in memory.
    """
    total_bytes = sum(array.nbytes for array in tensors.values())
    total_parameters = sum(array.size for array in tensors.values())
    check_disk(folder, total_bytes)
    plan = plan_shards({name: array.nbytes for name, array in tensors.items()}, shards)
    weight_map = {}
    with _progress() as progress:
        task = progress.add_task("weights", total=total_bytes)
        for i, names in enumerate(plan):
            shard = f"model-{i + 1:05d}-of-{len(plan):05d}.safetensors" if len(plan) > 1 else "model.safetensors"
            weight_map.update(dict.fromkeys(names, shard))
            _write_shard(folder / shard, names, tensors, lambda n: progress.advance(task, n))
    # total_parameters counts stored elements: packed words, scales and biases each as one.
    metadata = {"total_size": total_bytes, "total_parameters": total_parameters}
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))},
    )
    return total_bytes


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def plan_shards(sizes: dict[str, int], shards: int) -> list[list[str]]:
    """Cut the names, in order, into at most `shards` runs of about equal bytes; none is empty."""
    total_bytes = sum(sizes.values())
    runs: dict[int, list[str]] = {}
    start = 0
    for name, size in sizes.items():
        runs.setdefault(start * shards // max(total_bytes, 1), []).append(name)
        start += size
    return list(runs.values())


def _write_shard(path: Path, names: list[str], tensors: dict[str, mx.array], advance: Callable[[int], None]) -> None:
    with open(path, "wb") as file:
        file.write(_header({name: tensors[name] for name in names}))
        for name in names:
            array = mx.contiguous(tensors.pop(name))
            mx.eval(array)
            file.write(memoryview(array).cast("B"))
            advance(array.nbytes)


def _header(tensors: dict[str, mx.array]) -> bytes:
    """The safetensors header; needs shapes and dtypes only, so the arrays stay lazy."""
    header: dict[str, dict] = {"__metadata__": {"format": "mlx"}}
    start = 0
    for name, array in tensors.items():
        end = start + array.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
