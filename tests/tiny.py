"""Tiny random checkpoints for tests: any mlx-lm definition, a few kilobytes, with the demo model's tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
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
    predicate: Callable[[str, nn.Module], dict[str, Any] | bool] = lambda path, module: True,
    dtype: mx.Dtype = mx.float32,
) -> Path:
    """Write a random checkpoint of `config` (default: a qwen3_moe) to `folder`, with the demo's tokenizer.

    `bits`: of groups of 32, None for none; `quantization` says more than that, and `predicate` says for each module
    whether and how.
    """
    config = dict(QWEN3_MOE if config is None else config)
    if quantization == "default":
        quantization = None if bits is None else {"group_size": 32, "bits": bits}
    mx.random.seed(7)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.set_dtype(dtype)
    if quantization is not None:
        config["quantization"] = dict(quantization)

        def decide(path: str, module: nn.Module) -> dict[str, Any] | bool:
            decision = predicate(path, module) if hasattr(module, "to_quantized") else False
            if decision is not True and hasattr(module, "to_quantized"):
                config["quantization"][path] = decision
            return decision

        nn.quantize(model, **quantization, class_predicate=decide)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, dict(tree_flatten(model.parameters())), config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / name, folder / name)
    return folder


def save(folder: Path, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    """Write weights and config as mlx-lm would find them."""
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


def copy_folder(source: Path, target: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(source, target))
