"""Which stored tensor holds which expert array of a model. Knows names and layouts; reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from mlxmoe.errors import CheckpointError, UnsupportedModelError
from mlxmoe.experts.checkpoint import ExpertTensor
from mlxmoe.experts.layer import expert_arrays
from mlxmoe.experts.safetensors import Checkpoint

_STORED_DTYPES = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16",
    mx.uint32: "U32", mx.uint16: "U16", mx.uint8: "U8",
    mx.int32: "I32", mx.int8: "I8",
}  # fmt: skip


def locate_experts(
    model: nn.Module, modules: Mapping[str, nn.Module], checkpoint: Checkpoint
) -> dict[str, dict[str, ExpertTensor]]:
    """For each module's path and each of its expert arrays' names: where on disk it lies.

    The definition's own `sanitize` says which stored tensor becomes which parameter. One that it hands on untouched
    (the very same object) can be read in place, whatever it was renamed to; one that it computes cannot. Nothing is
    evaluated. Raises UnsupportedModelError or CheckpointError.
    """
    stored: dict[str, mx.array] = {}
    for file in checkpoint.files:
        stored.update(cast(dict[str, mx.array], mx.load(str(file))))
    stored_name = {id(array): name for name, array in stored.items()}
    parameters = model.sanitize(dict(stored)) if hasattr(model, "sanitize") else stored
    places: dict[str, dict[str, ExpertTensor]] = {}
    for path, module in modules.items():
        places[path] = {}
        for key, array in expert_arrays(module).items():
            name = stored_name.get(id(parameters.get(f"{path}.{key}")))
            if name is None:
                raise UnsupportedModelError(_unreadable(checkpoint, f"{path}.{key}"))
            places[path][key] = _stacked(checkpoint, name, key, array)
    return places


def _stacked(checkpoint: Checkpoint, name: str, key: str, array: mx.array) -> ExpertTensor:
    """The place of an array `[experts, ...]` that is stored as it is, once checked to be that."""
    info = checkpoint.tensors[name]
    if info.shape != tuple(array.shape) or info.dtype != _STORED_DTYPES.get(array.dtype):
        wanted = str(array.dtype).removeprefix("mlx.core.")
        raise CheckpointError(
            f"{info.file}: tensor {name} is {info.dtype} {list(info.shape)}, but the model wants "
            f"{wanted} {list(array.shape)} there."
        )
    return ExpertTensor.stacked(key, info.file, info.offset, info.nbytes, info.shape[0])


def _unreadable(checkpoint: Checkpoint, array: str) -> str:
    folder = checkpoint.folder
    return (
        f"The experts of {folder} ({array}) are stored in a layout that cannot be read in place. Convert it once "
        f"with `mlx_lm.convert --hf-path {folder} --mlx-path {folder.name}-mlx` and load that, or load it whole with "
        f"experts='all'."
    )
