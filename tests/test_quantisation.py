"""Every quantisation that mlx offers, the same bits as stock: the whole way from the checkpoint to the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tiny import QWEN3_MOE, make_tiny

from mlxmoe import load

TOKENS = list(range(5, 29))
CONFIG = {**QWEN3_MOE, "hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 128, "num_hidden_layers": 2}

MODES: dict[str, dict[str, Any] | None] = {
    f"affine {bits} bits, groups of {group_size}": {"bits": bits, "group_size": group_size}
    for bits in (2, 3, 4, 5, 6, 8)
    for group_size in (32, 64, 128)
}
MODES |= {
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
    "mxfp8": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "none": None,
}


def check(folder: Path) -> None:
    """A quarter of the experts against mlx-lm's own model."""
    stock, _ = load_model(folder)
    cache = make_prompt_cache(stock)
    expected = mx.concatenate([stock(mx.array([part]), cache=cache)[0] for part in (TOKENS[:-1], TOKENS[-1:])])
    with load(folder, experts="25%") as engine:
        assert mx.array_equal(engine.logits(TOKENS), expected)
        assert engine.stats().evictions > 0


@pytest.mark.parametrize("mode", MODES)
def test_every_quantisation_is_bit_identical(tmp_path: Path, mode: str) -> None:
    check(make_tiny(tmp_path / "model", CONFIG, quantization=MODES[mode]))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("mode", ["affine 4 bits, groups of 64", "affine 8 bits, groups of 32", "mxfp4"])
def test_scales_of_every_dtype_are_bit_identical(tmp_path: Path, mode: str, dtype: mx.Dtype) -> None:
    small = {**CONFIG, "num_experts": 8, "num_hidden_layers": 1}
    check(make_tiny(tmp_path / "model", small, quantization=MODES[mode], dtype=dtype))


def by_projection(path: str, module: nn.Module) -> dict[str, Any] | bool:
    """Each projection of the experts in its own way, the second layer's up not at all, the router in 8 bits."""
    if path.endswith("mlp.gate"):
        return {"bits": 8, "group_size": 64}
    if path.endswith("down_proj"):
        return {"bits": 6, "group_size": 32}
    if path.endswith("gate_proj"):
        return {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    return "layers.1" not in path


def router_as_it_is(path: str, module: nn.Module) -> dict[str, Any] | bool:
    return not path.endswith("mlp.gate")


@pytest.mark.parametrize("predicate", [by_projection, router_as_it_is])
def test_mixed_quantisation_is_bit_identical(tmp_path: Path, predicate: Any) -> None:
    check(make_tiny(tmp_path / "model", CONFIG, quantization={"bits": 4, "group_size": 64}, predicate=predicate))


def test_layers_of_unequal_size_share_the_budget(tmp_path: Path) -> None:
    def by_layer(path: str, module: nn.Module) -> dict[str, Any] | bool:
        return {"bits": 8 if "layers.0" in path else 2, "group_size": 64}

    folder = make_tiny(tmp_path / "model", CONFIG, quantization={"bits": 4, "group_size": 64}, predicate=by_layer)
    with load(folder, experts="50%") as engine:
        assert engine.plan.bank_bytes <= engine.plan.expert_bytes // 2
        assert {layer.slots for layer in engine.stats().layers} <= {4, 5}
    check(folder)
