"""Checkpoint layouts: what lies in runs of bytes is read in place, exactly; the rest is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import QWEN3_MOE, make_tiny, save

from mlxmoe import UnsupportedModelError, load

TOKENS = list(range(5, 60))
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}
QWEN3_5_MOE: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": 2048,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "type": "default"},
        "tie_word_embeddings": False,
    },
}


def weights(folder: Path) -> dict[str, mx.array]:
    tensors = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
    mx.eval(tensors)
    return tensors


def rewritten(source: Path, target: Path, change: Callable[[dict[str, mx.array]], None]) -> Path:
    """A copy of a tiny model with its tensors laid out in another way."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = weights(source)
    change(tensors)
    save(target, tensors, json.loads((source / "config.json").read_text()))
    return target


def per_expert(inside: str, names: dict[str, str]) -> Callable[[dict[str, mx.array]], None]:
    """Hugging Face's layout: one tensor for each expert, under the names of its own."""

    def change(tensors: dict[str, mx.array]) -> None:
        for name in [name for name in tensors if f"{inside}.switch_mlp." in name]:
            prefix, _, rest = name.partition(f"{inside}.switch_mlp.")
            projection, _, suffix = rest.partition(".")
            for expert, part in enumerate(tensors.pop(name)):
                tensors[f"{prefix}{inside}.experts.{expert}.{names[projection]}.{suffix}"] = mx.contiguous(part)

    return change


QWEN_NAMES = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
MIXTRAL_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def fused_halves(tensors: dict[str, mx.array]) -> None:
    """gate and up behind one another in one tensor, as newer Hugging Face checkpoints have them."""
    for name in [name for name in tensors if name.endswith("switch_mlp.gate_proj.weight")]:
        prefix = name.removesuffix("switch_mlp.gate_proj.weight")
        gate, up = tensors.pop(name), tensors.pop(f"{prefix}switch_mlp.up_proj.weight")
        tensors[f"{prefix}experts.gate_up_proj"] = mx.concatenate([gate, up], axis=-2)
        tensors[f"{prefix}experts.down_proj"] = tensors.pop(f"{prefix}switch_mlp.down_proj.weight")


CASES: dict[str, tuple[dict[str, Any], int | None, Callable[[dict[str, mx.array]], None]]] = {
    "qwen3_moe, one tensor an expert": (QWEN3_MOE, None, per_expert("mlp", QWEN_NAMES)),
    "mixtral, one tensor an expert": (MIXTRAL, None, per_expert("block_sparse_moe", MIXTRAL_NAMES)),
    "mixtral, one tensor an expert, 4 bits": (MIXTRAL, 4, per_expert("block_sparse_moe", MIXTRAL_NAMES)),
    "qwen3_5_moe, fused halves": (QWEN3_5_MOE, None, fused_halves),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("experts", ["25%", "70%"])
def test_a_layout_of_whole_runs_is_read_in_place_exactly(tmp_path: Path, case: str, experts: str) -> None:
    config, bits, change = CASES[case]
    converted = make_tiny(tmp_path / "mlx", config, bits=bits)
    other = rewritten(converted, tmp_path / "other", change)
    with load(converted, experts="all") as whole:
        expected = whole.logits(TOKENS)
    for folder in (converted, other):
        with load(folder, experts=experts) as engine:
            assert mx.array_equal(engine.logits(TOKENS), expected)
            assert engine.stats().evictions > 0


def test_prefixed_names_are_read_in_place(tmp_path: Path) -> None:
    converted = make_tiny(tmp_path / "mlx", QWEN3_5_MOE)

    def without_prefix(tensors: dict[str, mx.array]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("language_model.")] = tensors.pop(name)

    other = rewritten(converted, tmp_path / "other", without_prefix)
    with load(other, experts="all") as whole, load(other, experts="25%") as engine:
        assert mx.array_equal(engine.logits(TOKENS), whole.logits(TOKENS))


def test_shards_may_cut_a_layer_and_need_no_index(tmp_path: Path) -> None:
    converted = make_tiny(tmp_path / "mlx")
    tensors = weights(converted)
    other = rewritten(converted, tmp_path / "other", lambda tensors: None)
    (other / "model.safetensors").unlink()
    for shard in range(5):
        part = dict(sorted(tensors.items())[shard::5])
        mx.save_safetensors(str(other / f"model-{shard + 1:05}-of-00005.safetensors"), part)
    with load(converted, experts="all") as whole, load(other, experts="25%") as engine:
        assert mx.array_equal(engine.logits(TOKENS), whole.logits(TOKENS))


def transposed(tensors: dict[str, mx.array]) -> None:
    for name in [name for name in tensors if name.endswith("switch_mlp.gate_proj.weight")]:
        prefix = name.removesuffix("switch_mlp.gate_proj.weight")
        gate, up = tensors.pop(name), tensors.pop(f"{prefix}switch_mlp.up_proj.weight")
        tensors[f"{prefix}experts.gate_up_proj"] = mx.contiguous(mx.concatenate([gate, up], axis=-2).swapaxes(-1, -2))
        down = tensors.pop(f"{prefix}switch_mlp.down_proj.weight")
        tensors[f"{prefix}experts.down_proj"] = mx.contiguous(down.swapaxes(-1, -2))


def test_a_transposed_layout_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    qwen3_vl = {
        "model_type": "qwen3_vl_moe",
        "text_config": {**QWEN3_MOE, "tie_word_embeddings": False},
    }
    converted = make_tiny(tmp_path / "mlx", qwen3_vl, bits=None)
    other = rewritten(converted, tmp_path / "other", transposed)
    with load(other, experts="all") as whole, load(converted, experts="all") as same:
        assert mx.array_equal(whole.logits(TOKENS), same.logits(TOKENS)), "the layout is one that mlx-lm reads"
    with pytest.raises(UnsupportedModelError, match=rf"mlx_lm\.convert --hf-path {other} --mlx-path other-mlx"):
        load(other, experts="50%")
