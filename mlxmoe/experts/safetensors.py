"""Headers of safetensors files: which tensor lies where. Reads headers only; knows nothing of MLX.

The format: 8 bytes little-endian header length, that many bytes of JSON, then the data; offsets in the JSON
count from the start of the data (https://github.com/huggingface/safetensors#format). Nothing here trusts a file:
a download that stopped half way or a header that points past its file is refused by name.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from mlxmoe.errors import CheckpointError

# Bytes per element of the format's dtypes.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")


@dataclass(frozen=True, slots=True)
class FileState:
    """What a file looked like when its header was read: a later difference means that it changed.

    `size_bytes`: its length. `mtime_ns`: its last change, as the file system says.
    """

    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileState:
        stat = os.fstat(descriptor)
        return cls(stat.st_size, stat.st_mtime_ns)

    @classmethod
    def at(cls, path: Path) -> FileState:
        """Raises OSError."""
        stat = path.stat()
        return cls(stat.st_size, stat.st_mtime_ns)


class TensorInfo(NamedTuple):
    """One stored tensor. `offset`: where its data starts, in bytes from the start of `file`. There can be many."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a model folder, by name, and the state of each file when its header was read."""

    folder: Path
    tensors: Mapping[str, TensorInfo]
    files: Mapping[Path, FileState]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the header of every `model*.safetensors` in `folder`, the files that mlx-lm itself loads.

    Raises CheckpointError when there is none, when one that the index or a shard's own name promises is
    missing, and for any file that is truncated or malformed.
    """
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths and any(folder.glob("*.gguf")):
        raise CheckpointError(
            f"{folder} holds GGUF files, whose experts MLX cannot use as they lie. Take the model's safetensors "
            f"instead, and convert them once: mlx_lm.convert --hf-path HUB_ID --mlx-path {folder.name}-mlx"
        )
    if not paths:
        raise CheckpointError(
            f"{folder} holds no model*.safetensors file. If its weights have another format, "
            f"convert them once: mlx_lm.convert --hf-path {folder} --mlx-path {folder.name}-mlx"
        )
    index = _read_index(folder)
    _refuse_missing_shards(folder, paths, index)
    tensors: dict[str, TensorInfo] = {}
    files: dict[Path, FileState] = {}
    for path in paths:
        files[path], found = read_header(path)
        if twice := sorted(found.keys() & tensors.keys()):
            raise CheckpointError(
                f"{folder}: tensor {twice[0]} is in two files, {tensors[twice[0]].file.name} and {path.name}, and "
                f"{len(twice) - 1} more are too. Remove the file that does not belong to the model."
            )
        tensors.update(found)
    if absent := sorted(set(index) - set(tensors)):
        raise CheckpointError(
            f"{folder}: {len(absent)} of {len(index)} tensors named in the index are in no file, "
            f"the first is {absent[0]} (expected in {index[absent[0]]}). Download the model again."
        )
    return Checkpoint(folder, tensors, files)


def read_header(path: Path) -> tuple[FileState, dict[str, TensorInfo]]:
    """The state of one file and its tensors, each checked to lie inside the file."""
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is not a file. Download the model again.")
        with path.open("rb") as file:
            state = FileState.of(file.fileno())
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(state.size_bytes - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path} is no whole safetensors file: it has {state.size_bytes} bytes and claims a header "
                    f"of {length}. Download it again."
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}. Is it a link to a file that is gone?"
        ) from error
    entries = _parse_header(path, raw)
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
    if end > state.size_bytes:
        raise CheckpointError(
            f"{path} is truncated: its header describes {end} bytes, the file has {state.size_bytes}. "
            f"Download it again."
        )
    return state, tensors


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not JSON ({error}). Download it again.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is not a JSON object. Download it again.")
    header.pop("__metadata__", None)
    return header


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """Turn one header entry into a TensorInfo, or say what is wrong with it."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [begin, end, *shape]
    except (TypeError, KeyError, ValueError):
        dtype, shape, numbers = None, None, []
    # Large models have tens of thousands of tensors, so that a look at each in turn would take a second.
    if (
        type(dtype) is not str
        or type(shape) is not list
        or {*map(type, numbers)} != {int}
        or min(shape, default=0) < 0
    ):
        raise CheckpointError(f"{path}: the header's entry for {name} is malformed. Download it again.")
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: tensor {name} has dtype {dtype}, which is not known here.")
    nbytes = prod(shape) * ITEM_BYTES[dtype]
    if begin < 0 or end - begin != nbytes:
        raise CheckpointError(
            f"{path}: tensor {name} ({dtype}, shape {shape}) needs {nbytes} bytes, its offsets "
            f"{begin}..{end} give {end - begin}. Download it again."
        )
    return TensorInfo(name, path, dtype, tuple(shape), data_start + begin, nbytes)


def _read_index(folder: Path) -> dict[str, str]:
    """The weight map of `model.safetensors.index.json`: tensor -> file name; empty without an index."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors index ({error}). Download it again.") from error


def _refuse_missing_shards(folder: Path, paths: list[Path], index: dict[str, str]) -> None:
    expected = set(index.values())
    for path in paths:
        if shard := _SHARD.match(path.name):
            count = int(shard["count"])
            expected.update(
                f"{shard['stem']}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)
            )
    if missing := sorted(expected - {path.name for path in paths}):
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(expected)} weight files are missing, the first is {missing[0]}. "
            f"Download the model again."
        )
