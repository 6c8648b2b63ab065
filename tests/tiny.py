"""Tiny random checkpoints for tests: any mlx-lm definition, a few kilobytes, with the demo model's tokenizer."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes

from mlxmoe.hub import demo_folder

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
}


def make_tiny(
    folder: Path,
    config: dict[str, Any] | None = None,
    *,
    bits: int | None = 4,
    quantization: dict[str, Any] | Literal["default"] | None = "default",
    predicate: Callable[[str, nn.Module], dict[str, Any] | bool] | None = None,
    dtype: mx.Dtype = mx.float32,
) -> Path:
    """Write a random checkpoint of `config` (default: a qwen3_moe) to `folder`, with the demo's tokenizer.

    `bits`: of groups of 32, None for none; `quantization` says more than that, and `predicate` says for each module
    whether and how: by default the definition's own says it, and a width that the group size does not divide stays as
    it is, both as with `mlx_lm.convert`. A config that brings a quantisation of its own keeps it.
    """
    config = copy.deepcopy(QWEN3_MOE if config is None else config)
    if quantization == "default":
        quantization = None if bits is None or "quantization" in config else {"group_size": 32, "bits": bits}
    mx.random.seed(7)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    model.set_dtype(dtype)
    model.update(tree_map(_varied, model.parameters()))
    if quantization is not None:
        config["quantization"] = dict(quantization)
        wanted = predicate or getattr(model, "quant_predicate", None) or (lambda path, module: True)

        def decide(path: str, module: nn.Module) -> dict[str, Any] | bool:
            if not hasattr(module, "to_quantized") or module.weight.shape[-1] % quantization["group_size"]:
                return False
            decision = wanted(path, module)
            if decision is not True:
                config["quantization"][path] = decision
            return decision

        nn.quantize(model, **quantization, class_predicate=decide)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, dict(tree_flatten(model.parameters())), config)
    shutil.copy(demo_folder() / "tokenizer.json", folder)
    tokenizer = json.loads((demo_folder() / "tokenizer_config.json").read_text())
    tokenizer["chat_template_type"] = None  # mlx-lm has a default for some types that needs a template here
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def _varied(array: mx.array) -> mx.array:
    """Something random where a definition starts from zeros: a router of zeros would not route."""
    if array.any() or not array.size:
        return array
    if not mx.issubdtype(array.dtype, mx.floating):
        return mx.random.randint(0, 2**31 - 1, array.shape).astype(array.dtype)
    spread = 0.1 if array.ndim > 1 else 0.02  # a bias on the router's scores must not outweigh them
    return (spread * mx.random.normal(array.shape)).astype(array.dtype)


def save(folder: Path, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    """Write weights and config as mlx-lm would find them."""
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


def copy_folder(source: Path, target: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(source, target))


def make_adapter(folder: Path) -> Path:
    """A LoRA adapter of one projection of a tiny qwen3_moe model, in a new folder."""
    folder.mkdir()
    rank = {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    prefix = "model.layers.2.self_attn.q_proj"
    tensors = {f"{prefix}.lora_a": mx.ones((64, 2)), f"{prefix}.lora_b": mx.ones((2, 64))}
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    return folder
