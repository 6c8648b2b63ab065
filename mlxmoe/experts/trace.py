"""Recorded routing, and its file. Knows NumPy and files, not MLX, models or statistics.

The file is an `.npz` with `experts` (uint16, `[tokens, moe_layers, top_k]`), `num_experts` (int64, one number, or
one for each layer where they differ) and optionally `layers` (int64: the model's layer number of each column) and
`weights` (float16, like `experts`). `NO_EXPERT` stands where a layer has a smaller top_k than the widest, or was not
asked for that token at all.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxmoe.errors import SavedStateError
from mlxmoe.writing import replacing

NO_EXPERT = 0xFFFF

# What each array of the file may be, and how many axes it may have.
_ARRAYS = {"experts": ("u", {3}), "num_experts": ("ui", {0, 1}), "layers": ("ui", {1}), "weights": ("f", {3})}

# What NumPy and zipfile raise for a file that is torn, altered or something else.
_NOT_WHOLE = (
    ValueError, TypeError, EOFError, KeyError, MemoryError, NotImplementedError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Trace:
    """Which experts each token asked for: `experts` uint16 `[tokens, moe_layers, top_k]`, NO_EXPERT where none.

    `num_experts`: of each layer. `layers`: the model's number of each column, None where it is not known. `weights`:
    the router's, float16 as `experts`, None where they were not recorded. Raises ValueError for what does not fit.
    """

    experts: npt.NDArray[np.uint16]
    num_experts: tuple[int, ...]
    layers: tuple[int, ...] | None = None
    weights: npt.NDArray[np.float16] | None = None

    def __post_init__(self) -> None:
        if self.experts.dtype != np.uint16 or self.experts.ndim != 3:
            raise ValueError(f"experts is {self.experts.dtype} {list(self.experts.shape)}, not uint16 of three axes")
        _, columns, top_k = self.experts.shape
        if not columns or not top_k:
            raise ValueError(f"experts has {columns} layers and {top_k} experts a token")
        if len(self.num_experts) != columns or not all(1 <= count <= NO_EXPERT for count in self.num_experts):
            raise ValueError(f"num_experts is {self.num_experts} for {columns} layers, each from 1 to {NO_EXPERT}")
        beyond = (self.experts >= np.array(self.num_experts)[:, None]) & (self.experts != NO_EXPERT)
        if beyond.any():
            token, column, rank = (int(n) for n in np.argwhere(beyond)[0])
            raise ValueError(
                f"token {token} asks layer {column} for expert {self.experts[token, column, rank]}, "
                f"which has {self.num_experts[column]}"
            )
        if self.layers is not None and len(self.layers) != columns:
            raise ValueError(f"layers has {len(self.layers)} numbers for {columns} layers")
        if self.weights is not None and self.weights.shape != self.experts.shape:
            raise ValueError(f"weights has shape {list(self.weights.shape)}, experts {list(self.experts.shape)}")

    @property
    def tokens(self) -> int:
        return int(self.experts.shape[0])

    @property
    def top_k(self) -> int:
        """Of the layer that has most."""
        return int(self.experts.shape[2])

    def counts(self) -> list[list[int]]:
        """For each layer how often each of its experts was asked for."""
        counts = []
        for column, num_experts in enumerate(self.num_experts):
            asked = self.experts[:, column].ravel()
            counts.append(np.bincount(asked[asked != NO_EXPERT], minlength=num_experts).tolist())
        return counts

    def save(self, path: str | Path) -> Path:
        """Write the file `path`, which takes its place when it is whole. Raises SavedStateError."""
        path = Path(path).expanduser()
        same = len(set(self.num_experts)) == 1
        arrays: dict[str, Any] = {
            "experts": self.experts,
            "num_experts": np.int64(self.num_experts[0]) if same else np.array(self.num_experts, np.int64),
        }
        if self.layers is not None:
            arrays["layers"] = np.array(self.layers, np.int64)
        if self.weights is not None:
            arrays["weights"] = self.weights.astype(np.float16)
        try:
            with replacing(path, durable=False) as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
        except OSError as error:
            raise SavedStateError(
                f"{path} cannot be written: {error.strerror or error}. Choose another place for the trace."
            ) from error
        return path

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """The trace in the file `path`. Raises SavedStateError for anything but a whole trace."""
        path = Path(path).expanduser()
        try:
            found = _read(path)
            missing = {"experts", "num_experts"} - found.keys()
            if missing:
                raise ValueError(f"it holds no {' and no '.join(sorted(missing))}")
            columns = found["experts"].shape[1]
            counts = np.broadcast_to(found["num_experts"], (columns,)).tolist()
            layers, weights = found.get("layers"), found.get("weights")
            return cls(
                experts=found["experts"].astype(np.uint16, casting="safe", copy=False),
                num_experts=tuple(counts),
                layers=None if layers is None else tuple(layers.tolist()),
                weights=None if weights is None else weights.astype(np.float16, copy=False),
            )
        except OSError as error:
            raise SavedStateError(f"{path} cannot be read: {error.strerror or error}. Is the path right?") from error
        except _NOT_WHOLE as error:
            raise SavedStateError(
                f"{path} is no whole trace: {error}. Use a copy of it, or record it again: mlxmoe profile --trace."
            ) from error


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a trace file that are known here; nothing in it is run."""
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError("it is no .npz file, or its end is missing")
        file.seek(0)
        with np.load(file, allow_pickle=False) as stored:
            found = {name: stored[name] for name in _ARRAYS if name in stored.files}
    for name, array in found.items():
        kinds, axes = _ARRAYS[name]
        if array.dtype.kind not in kinds or array.ndim not in axes:
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}")
    return found


def layer_numbers(paths: Sequence[str]) -> tuple[int, ...] | None:
    """The model's layer number of each module path: the first in it; None where that tells none apart."""
    numbers = [next((int(part) for part in path.split(".") if part.isdigit()), None) for path in paths]
    known = tuple(number for number in numbers if number is not None)
    return known if len(set(known)) == len(paths) else None
