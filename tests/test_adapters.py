"""LoRA adapters: on trunk modules they work and equal stock; on routed experts they are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load as stock_load
from mlx_lm.utils import load_model

from mlxmoe import CheckpointError, ModelError, UnsupportedModelError, load

TOKENS = list(range(5, 40))


def make_adapter(model_folder: Path, folder: Path, keys: list[str], kind: str = "lora") -> Path:
    """A random adapter of the modules named `keys`, as mlx-lm's trainer would save it."""
    model, _ = load_model(model_folder)
    parameters: dict[str, Any] = {"rank": 4, "scale": 10.0, "dropout": 0.1, "keys": keys}
    linear_to_lora_layers(model, 2, parameters, use_dora=kind == "dora")
    mx.random.seed(1)
    leaves = {
        name: mx.random.normal(array.shape) * 0.1
        for name, array in tree_flatten(model.parameters())
        if name.rsplit(".")[-1] in ("lora_a", "lora_b", "m")
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), leaves)
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_of_the_trunk_equals_stock(tiny: Path, tmp_path: Path, kind: str) -> None:
    adapter = make_adapter(tiny, tmp_path / "adapter", ["self_attn.q_proj", "self_attn.o_proj"], kind)
    stock, _ = stock_load(str(tiny), adapter_path=str(adapter))  # type: ignore[misc]
    cache = make_prompt_cache(stock)
    expected = mx.concatenate([stock(mx.array([part]), cache=cache)[0] for part in (TOKENS[:-1], TOKENS[-1:])])
    for experts in ("25%", "all"):
        with load(tiny, adapter=adapter, experts=experts) as engine, load(tiny, experts=experts) as plain:
            assert mx.array_equal(engine.logits(TOKENS), expected)
            assert not mx.array_equal(plain.logits(TOKENS), expected)


def test_an_adapter_of_routed_experts_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny, tmp_path / "adapter", ["self_attn.q_proj", "mlp.switch_mlp.up_proj"])
    with pytest.raises(UnsupportedModelError, match=r"layers\.\d\.mlp\.switch_mlp\.up_proj.*mlx_lm\.fuse"):
        load(tiny, adapter=adapter)


def test_a_full_fine_tune_that_leaves_the_experts_alone_is_used(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "full"}))
    mx.save_safetensors(str(folder / "adapters.safetensors"), {"model.norm.weight": mx.full((64,), 2.0)})
    with load(tiny, adapter=folder, experts="25%") as engine, load(tiny) as plain:
        assert mx.allclose(engine.logits(TOKENS), 2 * plain.logits(TOKENS), rtol=1e-5)  # a norm twice as large
    experts = {"model.layers.0.mlp.switch_mlp.up_proj.scales": mx.zeros((8, 64, 2))}
    mx.save_safetensors(str(folder / "adapters.safetensors"), experts)
    with pytest.raises(UnsupportedModelError, match="routed experts"):
        load(tiny, adapter=folder)


def test_a_full_fine_tune_of_another_kind_of_number_is_refused_by_its_own_name(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "full"}))
    mx.save_safetensors(str(folder / "adapters.safetensors"), {"model.norm.weight": mx.ones((64,), dtype=mx.int32)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored as int32") as caught:
        load(tiny, adapter=folder)
    assert str(folder) in str(caught.value)
    assert str(tiny) not in str(caught.value)


def test_an_adapter_that_is_none_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="adapter"):
        load(tiny, adapter=tmp_path)
    adapter = make_adapter(tiny, tmp_path / "adapter", ["self_attn.q_proj"])
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapter"):
        load(tiny, adapter=adapter)
