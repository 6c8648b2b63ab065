"""Model folders that have everything but the weights' bytes: from headers alone, or from a config alone.

A weight file is its header with a hole of the right length behind it, which takes no room on the disk. mlx-lm opens
such a folder as any other, and `opening` reads the same sizes off it: whatever is planned is planned for what `load`
would see, with no second idea of any definition's sizes.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes

from mlxmoe.errors import ModelError, PlanError
from mlxmoe.opening import definition_errors

GROUP_SIZE = 64  # of mlx_lm.convert
BITS = (2, 3, 4, 5, 6, 8)

_DTYPE_NAMES = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.uint16: "U16", mx.uint8: "U8",
    mx.int64: "I64", mx.int32: "I32", mx.int16: "I16", mx.int8: "I8", mx.bool_: "BOOL",
}  # fmt: skip
_FLOATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# Quantised formats of quantization_config that mlx-lm keeps; it turns blocks of fp8 into 16 bits.
_KEPT = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}


def write_headers(folder: Path, headers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Put files with these headers, by their names, and holes for data into `folder`."""
    for name, entries in headers.items():
        _write(folder / name, entries)


def write_from_config(folder: Path, config: dict[str, Any], bits: int | None) -> None:
    """Put the checkpoint that mlx-lm would write for `config`, with holes for data, into `folder`.

    Quantised as the config says, and what is not quantised then to `bits`, as `mlx_lm.convert -q` does. Raises
    ModelError and its kin, PlanError for bits that MLX has not. Evaluates nothing.
    """
    if bits is not None and bits not in BITS:
        raise PlanError(f"bits={bits!r} is not offered by MLX: {', '.join(map(str, BITS))}.")
    if bits is not None and "quantization" in config:
        raise PlanError(
            f"bits={bits} is for weights that are not quantised, but the config says that these are. Leave it out."
        )
    if config.get("model_file"):
        raise ModelError("A model that brings its own code can only be planned for with its weights' headers.")
    config = copy.deepcopy(config)
    with definition_errors(folder, config["model_type"]):
        model_class, args_class = _get_classes(config)
        model: nn.Module = model_class(args_class.from_dict(copy.deepcopy(config)))
        _cast(model, config)
        _quantize(model, config, bits)
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for name, array in tree_flatten(model.parameters()):
        offsets = [end, end + array.nbytes]
        entries[name] = {"dtype": _DTYPE_NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        end += array.nbytes
    _write(folder / "model.safetensors", entries)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _write(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    header = json.dumps(entries).encode()
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def _cast(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Floating point as the config says, as `mlx_lm.convert` casts it."""
    text = config.get("text_config")
    sources = [config, text if isinstance(text, dict) else {}]
    said = next((s[key] for s in sources for key in ("torch_dtype", "dtype") if s.get(key)), "bfloat16")
    dtype = _FLOATS.get(said, mx.bfloat16)
    may_cast = getattr(model, "cast_predicate", lambda _: True)
    model.update(
        tree_map_with_path(
            lambda name, array: (
                array.astype(dtype) if may_cast(name) and mx.issubdtype(array.dtype, mx.floating) else array
            ),
            model.parameters(),
        )
    )


def _quantize(model: nn.Module, config: dict[str, Any], bits: int | None) -> None:
    """Modifies both. What a config's entry for a path says goes before what the definition wants."""
    said, left_out = _said_quantization(config)
    wants = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def decide(path: str, module: nn.Module, group_size: int) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
            return False
        decision: bool | dict[str, Any] = wants(path, module)
        return decision

    if said is not None:
        config.pop("quantization_config", None)
        config["quantization"] = dict(said)

        def as_said(path: str, module: nn.Module) -> bool | dict[str, Any]:
            if isinstance(said.get(path), bool | dict):
                entry: bool | dict[str, Any] = said[path]
                return entry
            if any(fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*") for pattern in left_out):
                return False
            return bool(decide(path, module, said["group_size"]))

        mode = said.get("mode", "affine")
        nn.quantize(model, said["group_size"], said["bits"], mode=mode, class_predicate=as_said)
    if bits is not None:
        config.pop("quantization_config", None)
        quantization = config.setdefault("quantization", {"group_size": GROUP_SIZE, "bits": bits})

        def to_bits(path: str, module: nn.Module) -> bool | dict[str, Any]:
            decision = decide(path, module, GROUP_SIZE)
            if decision is True and said is not None:
                decision = {"group_size": GROUP_SIZE, "bits": bits}
            if isinstance(decision, dict):
                quantization[path] = decision
            return decision

        nn.quantize(model, GROUP_SIZE, bits, class_predicate=to_bits)


def _said_quantization(config: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """What the config says of quantisation that is in the weights, and the paths that it leaves out."""
    if isinstance(said := config.get("quantization"), dict):
        return said, []
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not isinstance(found, dict):
        return None, []
    method = found.get("quant_method")
    if method in _KEPT:
        return _KEPT[method], list(found.get("modules_to_not_convert") or ())
    if method == "fp8":
        if found.get("scale_fmt") == "ue8m0" and list(found.get("weight_block_size", ())) == [32, 32]:
            return _KEPT["mxfp8"], []
        return None, []
    raise ModelError(
        f"Weights quantised with {method} have sizes that the config does not tell. Give the hub id or a folder with "
        f"the weights, or bits= on the config of the unquantised model."
    )
