"""Which stored bytes make up which expert array of a model. Knows names and layouts; reads no weights.

A definition's own `sanitize` turns stored tensors into parameters: it renames, stacks experts, cuts fused ones in
halves. Rather than knowing every naming scheme, this module watches it do so. A tensor that it hands on untouched
(the very same object) lies in place. What it computes is traced: `sanitize` runs once more on small stand-ins whose
elements are numbered, and the numbers that come out say where each expert came from. Consecutive numbers are a run of
bytes and can be read in place; anything else (transposed, interleaved, dequantised) cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar, cast

import mlx.core as mx
import mlx.nn as nn

from mlxmoe.errors import CheckpointError, UnsupportedModelError
from mlxmoe.experts.checkpoint import ExpertTensor
from mlxmoe.experts.safetensors import Checkpoint, TensorInfo
from mlxmoe.experts.switch import expert_arrays

_STORED_DTYPES = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16",
    mx.uint32: "U32", mx.uint16: "U16", mx.uint8: "U8",
    mx.int32: "I32", mx.int8: "I8",
}  # fmt: skip

Weights = dict[str, mx.array]


def locate_experts(
    model: nn.Module, modules: Mapping[str, nn.Module], checkpoint: Checkpoint
) -> dict[str, dict[str, ExpertTensor]]:
    """For each module's path and each of its expert arrays' names: where on disk each expert's part lies.

    No weight is read. Raises UnsupportedModelError for a layout that cannot be read in place, CheckpointError for a
    tensor of another shape or dtype than the model wants.
    """
    stored: Weights = {}
    for file in checkpoint.files:
        stored.update(cast(Weights, mx.load(str(file))))
    parameters = _sanitized(model, stored)
    stored_name = {id(array): name for name, array in stored.items()}
    arrays = {
        f"{path}.{key}": array for path, module in modules.items() for key, array in expert_arrays(module).items()
    }
    untouched = {name: stored_name.get(id(parameters.get(name))) for name in arrays}
    traced = [name for name, source in untouched.items() if source is None]
    trace = _Trace(model, stored, checkpoint, [arrays[name] for name in traced]) if traced else None
    places: dict[str, dict[str, ExpertTensor]] = {path: {} for path in modules}
    for path, module in modules.items():
        for key, array in expert_arrays(module).items():
            name = f"{path}.{key}"
            source = untouched[name]
            if source is not None:
                places[path][key] = _stacked(checkpoint.tensors[source], array)
            else:
                assert trace is not None, "what is not untouched is traced"
                places[path][key] = trace.place(name, array)
    return places


def _sanitized(model: nn.Module, weights: Weights) -> Weights:
    return cast(Weights, model.sanitize(dict(weights))) if hasattr(model, "sanitize") else weights


def _stacked(info: TensorInfo, array: mx.array) -> ExpertTensor:
    """The place of an array `[experts, ...]` that is stored as it is."""
    if info.shape != tuple(array.shape):
        raise CheckpointError(
            f"{info.file}: tensor {info.name} has shape {list(info.shape)}, but the model wants {list(array.shape)}."
        )
    _refuse_other_dtype(info, array)
    return ExpertTensor.stacked(info.file, info.offset, info.nbytes, info.shape[0])


def _refuse_other_dtype(info: TensorInfo, array: mx.array) -> None:
    if info.dtype != _STORED_DTYPES.get(array.dtype):
        wanted = str(array.dtype).removeprefix("mlx.core.")
        raise CheckpointError(f"{info.file}: tensor {info.name} is {info.dtype}, but the model wants {wanted} there.")


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A stand-in's numbers: element `n` of it is `first + n`, of `count`."""

    info: TensorInfo
    first: int
    count: int


class _Trace:
    """One run of a definition's `sanitize` on numbered stand-ins for the tensors that may hold experts."""

    SMALL: ClassVar = {1: (2,), 2: (4, 2)}  # shape of a stand-in for one expert's vector or matrix

    def __init__(self, model: nn.Module, stored: Weights, checkpoint: Checkpoint, wanted: list[mx.array]) -> None:
        self._checkpoint = checkpoint
        self._numbered: list[_Numbered] = []
        self._owner: list[int] = []  # which stand-in each number belongs to
        weights = dict(stored)
        for name, shape in self._stand_ins(checkpoint, wanted):
            first, count = len(self._owner), prod(shape)
            self._owner += [len(self._numbered)] * count
            self._numbered.append(_Numbered(checkpoint.tensors[name], first, count))
            weights[name] = mx.arange(first, first + count, dtype=mx.int32).reshape(shape)
        try:
            self._parameters = _sanitized(model, weights)
        except Exception:  # it needs the real shapes or values: then it computes, and its layout is not in place
            self._parameters = {}

    def place(self, name: str, array: mx.array) -> ExpertTensor:
        """Where each expert's part of `array` lies, by the numbers that `sanitize` made of it."""
        numbers = self._parameters.get(name)
        if numbers is None or numbers.dtype != mx.int32 or numbers.shape[0] != array.shape[0]:
            raise self._unreadable(name, [])
        nbytes = array.nbytes // array.shape[0]
        files, offsets = [], []
        for run in cast(list[list[int]], numbers.reshape(numbers.shape[0], -1).tolist()):
            source = self._numbered[self._owner[run[0]]] if 0 <= run[0] < len(self._owner) else None
            if source is None or run != list(range(run[0], run[0] + len(run))):
                raise self._unreadable(name, run)
            start, rest = divmod(run[0] - source.first, len(run))
            if rest or source.count % len(run) or source.info.nbytes * len(run) != nbytes * source.count:
                raise self._unreadable(name, run)
            _refuse_other_dtype(source.info, array)
            files.append(source.info.file)
            offsets.append(source.info.offset + start * nbytes)
        return ExpertTensor(nbytes, tuple(files), tuple(offsets))

    def _stand_ins(self, checkpoint: Checkpoint, wanted: list[mx.array]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every stored tensor whose shape says that it may hold one or all experts, one or two fused parts each."""
        shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        for array in wanted:
            experts, *part = array.shape
            if (small := self.SMALL.get(len(part))) is None:
                continue
            for fused in (1, 2):
                one, one_small = (fused * part[0], *part[1:]), (fused * small[0], *small[1:])
                for shape, stand_in in ((one, one_small), (one[::-1], one_small[::-1])):  # and transposed, to say so
                    shapes.setdefault(shape, stand_in)
                    shapes.setdefault((experts, *shape), (experts, *stand_in))
        for name, info in checkpoint.tensors.items():
            if info.shape in shapes:
                yield name, shapes[info.shape]

    def _unreadable(self, array: str, run: list[int]) -> UnsupportedModelError:
        folder = self._checkpoint.folder
        return UnsupportedModelError(
            f"The experts of {folder} ({array}) are stored {self._layout(run)}, which cannot be read in place. "
            f"Convert the model once with `mlx_lm.convert --hf-path {folder} --mlx-path {folder.name}-mlx` and load "
            f"that, or load it whole with experts='all'."
        )

    def _layout(self, run: list[int]) -> str:
        """The name of a layout that cannot be read in place; `run`: the numbers of one expert, if any came out."""
        tensors = self._checkpoint.tensors.values()
        if any(info.dtype.startswith("F8") or info.name.endswith("weight_scale_inv") for info in tensors):
            return "in blocks of fp8"
        if any(info.name.endswith(("qweight", "weight_packed")) for info in tensors):
            return "as packed integers (AWQ, GPTQ or compressed-tensors)"
        if any(info.name.endswith("_blocks") for info in tensors):
            return "with gate and up interleaved in mxfp4 blocks"
        if run and sorted(run) == list(range(min(run), min(run) + len(run))):
            return "transposed"
        step = run[-1] - run[-2] if len(run) > 1 else 0
        return "transposed and fused" if step > 1 else "interleaved" if run else "in a layout that has to be computed"
