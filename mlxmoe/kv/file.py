"""Files that hold cache states: written beside and renamed, read with nothing taken on trust.

A file is a safetensors file (https://github.com/huggingface/safetensors#format) that any reader of that format can
open. Its metadata holds `mlxmoe`, the version of what this module writes; `facts`, JSON with whatever the writer says
of the state and with the form of each cache's state; and `blake2b`, the digest of the facts, of the header's entries
and of all data, by which a torn or altered file is noticed. Knows nothing of sessions or models.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from mlxmoe.errors import SavedStateError, TornStateError, brief
from mlxmoe.kv.state import CacheState
from mlxmoe.memory.sizes import format_bytes
from mlxmoe.writing import keep_name, refuse_special, replacing

FORMAT = "1"
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_PIECE_BYTES = 64 * 2**20  # written and digested at a time

_DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "U32": mx.uint32,
    "I32": mx.int32, "U64": mx.uint64, "I64": mx.int64, "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32,
    "F64": mx.float64, "C64": mx.complex64,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def given_path(path: object) -> Path:
    """`path`, as a caller gave it, with ~ for a home folder. Raises SavedStateError for what can be no path."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise SavedStateError(f"{path!r} is no path. Give a str or a pathlib.Path that names a place for states.")
    try:
        if b"\0" in os.fsencode(text):
            raise ValueError("it holds a zero byte")
        return Path(text).expanduser()
    except (ValueError, RuntimeError) as error:  # a lone surrogate; a user who is not known here
        why = brief(error).rstrip(".")
        raise SavedStateError(f"{text!r} is no path: {why}. Write it out, without ~ or odd characters.") from error


def write_states(path: Path, facts: Mapping[str, Any], states: Sequence[CacheState], *, durable: bool = True) -> None:
    """Write `states`, and `facts` (plain JSON values) of them, to `path`; what was there stays whole until the last.

    `durable`: return only when the drive has it. Raises SavedStateError, and leaves no part of a file behind.
    """
    arrays = [array for state in states for array in state.arrays()]
    numbers = iter(range(len(arrays)))
    forms = [_form(state, numbers) for state in states]
    header = _header(json.dumps({**facts, "caches": forms}), arrays)
    try:
        with replacing(path, durable=durable) as file:
            file.write(header)
            for array in arrays:
                for piece in _pieces(array):
                    file.write(piece)
    except OSError as error:
        needed = len(header) + sum(array.nbytes for array in arrays)
        raise SavedStateError(f"{path} cannot be written: {_why_not(path, error, needed)}") from error
    if durable:
        try:
            keep_name(path)
        except OSError as error:
            raise SavedStateError(
                f"{path} is written and took its place, but its folder cannot be put on the drive "
                f"({error.strerror or error}): a power cut now may bring back what was there. Save it again."
            ) from error


def read_states(
    path: Path, admit: Callable[[dict[str, Any], list[CacheState]], object] = lambda facts, states: None
) -> tuple[dict[str, Any], list[CacheState]]:
    """The facts and the states that `write_states` wrote. Raises SavedStateError for anything but a whole file.

    `admit(facts, states)` is called before any memory is taken for the states, which have None in the place of
    arrays, and may raise. That the file is whole is not known then.
    """
    try:
        with _opened(path) as (file, size):
            entries, metadata = _read_header(path, file, size)
            facts = _read_facts(path, metadata)
            digest = _new_digest(metadata["facts"], entries)
            forms = facts.pop("caches")
            admit(facts, _states(path, forms, [None] * len(entries)))
            arrays = [_read_array(path, file, entry, digest) for entry in entries]
    except OSError as error:
        raise SavedStateError(f"{path} cannot be read: {error.strerror or error}. Is the path right?") from error
    if digest.hexdigest() != metadata.get("blake2b"):
        raise _torn(path, "its content does not have the digest it was written with")
    return facts, _states(path, forms, arrays)


def read_facts(path: Path) -> dict[str, Any]:
    """The facts alone, by the header; whether the data is whole is not looked at. Raises SavedStateError."""
    try:
        with _opened(path) as (file, size):
            _, metadata = _read_header(path, file, size)
    except OSError as error:
        raise SavedStateError(f"{path} cannot be read: {error.strerror or error}. Is the path right?") from error
    return _read_facts(path, metadata)


# --- writing ----------------------------------------------------------------------------------------------


def _why_not(path: Path, error: OSError, needed: int) -> str:
    """Why a file of `needed` bytes could not be written as `path`, and what to do about it."""
    if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
        return f"the folder {path.parent} does not exist. Make it, or choose another place."
    why = error.strerror or error
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{why}. Choose another place; what was there is as it was."
    return (
        f"{why}. It needs {format_bytes(needed)}, and {format_bytes(shutil.disk_usage(path.parent).free)} are free "
        f"there. Free some, or choose another place; what was there is as it was."
    )


def _header(facts: str, arrays: Sequence[mx.array]) -> bytes:
    entries, offset = [], 0
    for array in arrays:
        end = offset + array.nbytes
        dtype, shape = _DTYPE_NAMES[array.dtype], list(array.shape)
        entries.append({"dtype": dtype, "shape": shape, "data_offsets": [offset, end]})
        offset = end
    digest = _new_digest(facts, entries)
    for array in arrays:
        for piece in _pieces(array):
            digest.update(piece)
    metadata = {"format": "mlx", "mlxmoe": FORMAT, "facts": facts, "blake2b": digest.hexdigest()}
    named = {str(number): entry for number, entry in enumerate(entries)}
    text = json.dumps({"__metadata__": metadata, **named}).encode()
    text += b" " * (-(8 + len(text)) % 64)  # data on a boundary, as the format advises
    return struct.pack("<Q", len(text)) + text


def _new_digest(facts: str, entries: Sequence[Any]) -> Any:
    return hashlib.blake2b(json.dumps([facts, list(entries)], sort_keys=True).encode(), digest_size=32)


def _pieces(array: mx.array) -> Iterator[memoryview]:
    """The bytes of an evaluated, contiguous array."""
    if array.size:
        whole = memoryview(array).cast("B")  # type: ignore[arg-type]
        for start in range(0, len(whole), _PIECE_BYTES):
            yield whole[start : start + _PIECE_BYTES]


# --- reading ----------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its size. Raises OSError for anything else."""
    # without O_NONBLOCK, to open a pipe is to wait until somebody writes to it
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        refuse_special(status.st_mode)
        yield file, status.st_size


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[list[Any], dict[str, Any]]:
    """The tensors' entries in the order of their numbers, and the metadata; the data is as long as they say."""
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise _torn(path, f"it has {size} bytes and claims a header of {length}")
    try:
        named = json.loads(file.read(length))
        metadata = named.pop("__metadata__")
        if (version := metadata["mlxmoe"]) != FORMAT:
            raise SavedStateError(
                f"{path} is in version {version} of the format, and this mlxmoe reads version {FORMAT}. Read it with "
                f"the mlxmoe that wrote it, or begin anew."
            )
        entries = [named[str(number)] for number in range(len(named))]
        end = 0
        for entry in entries:
            if not all(type(length) is int and 0 <= length < 2**31 for length in entry["shape"]):
                raise ValueError(f"a shape of {entry['shape']}")
            begin, after = end, end + _DTYPES[entry["dtype"]].size * prod(entry["shape"])
            if entry["data_offsets"] != [begin, after]:
                raise ValueError(f"entries that do not follow one another at byte {begin}")
            end = after
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _torn(path, f"its header makes no sense ({type(error).__name__}: {error})") from error
    if 8 + length + end != size:
        raise _torn(path, f"it has {size} bytes, and its header describes {8 + length + end}")
    return entries, metadata


def _read_facts(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        facts = json.loads(metadata["facts"])
        if not isinstance(facts, dict) or not isinstance(facts["caches"], list):
            raise ValueError("no facts")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _torn(path, f"its facts make no sense ({type(error).__name__}: {error})") from error
    return facts


def _read_array(path: Path, file: BinaryIO, entry: Mapping[str, Any], digest: Any) -> mx.array:
    array = mx.zeros(entry["shape"], _DTYPES[entry["dtype"]])
    mx.eval(array)
    for piece in _pieces(array):
        if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
            raise _torn(path, "it ended while it was read")
        digest.update(piece)
    return array


def _torn(path: Path, why: str) -> TornStateError:
    return TornStateError(f"{path} is no whole saved state: {why}. Use a copy of it if there is one, or begin anew.")


# --- the form of a state: its trees with numbers in the place of arrays ---------------------------------------


def _form(state: CacheState, numbers: Iterator[int]) -> dict[str, Any]:
    return {
        "kind": state.kind,
        "fixed": dict(state.fixed),
        "span": state.span,
        "values": [_tree_form(value, numbers) for value in state.values],
        "parts": [_form(part, numbers) for part in state.parts],
    }


def _states(path: Path, forms: Sequence[Any], arrays: Sequence[Any]) -> list[CacheState]:
    try:
        return [_state(form, arrays) for form in forms]
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise _torn(path, f"its forms make no sense ({type(error).__name__}: {error})") from error


def _state(form: Mapping[str, Any], arrays: Sequence[Any]) -> CacheState:
    return CacheState(
        kind=form["kind"],
        fixed=dict(form["fixed"]),
        values=[_tree(value, arrays) for value in form["values"]],
        parts=[_state(part, arrays) for part in form["parts"]],
        span=None if form["span"] is None else (form["span"][0], form["span"][1]),
    )


def _tree_form(tree: Any, numbers: Iterator[int]) -> Any:
    if isinstance(tree, mx.array):
        return {"array": next(numbers)}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [_tree_form(item, numbers) for item in tree]}
    assert tree is None or isinstance(tree, bool | int | float | str), f"{type(tree)} in a cache's state"
    return tree


def _tree(form: Any, arrays: Sequence[Any]) -> Any:
    match form:
        case {"array": int(number)}:
            return arrays[number]
        case {"list": items}:
            return [_tree(item, arrays) for item in items]
        case {"tuple": items}:
            return tuple(_tree(item, arrays) for item in items)
    return form
