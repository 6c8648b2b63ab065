"""What this project relies on inside MLX and mlx-lm, a test each, failing with a sentence that says what moved."""

from __future__ import annotations

import copy
import inspect
import os
import sys
import types
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import CacheList, KVCache, can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.utils import _get_classes, load_adapters, load_model

from mlxmoe.hub import demo_folder
from mlxmoe.kv.positions import Rotation
from mlxmoe.kv.window import SlidingWindowKVCache


def test_the_version_is_in_the_pinned_range() -> None:
    assert mlx_lm.__version__.startswith("0.32."), "pyproject.toml pins mlx-lm to what these tests were read against"


@pytest.mark.parametrize("switch", [SwitchGLU, SwitchMLP])
def test_switch_modules_are_called_with_x_and_indices(switch: type) -> None:
    assert list(inspect.signature(switch.__call__).parameters) == ["self", "x", "indices"], (
        f"{switch.__name__}.__call__ takes other arguments: layer.py hands on x and indices"
    )
    module = switch(8, 16, 4)
    assert module(mx.zeros((1, 3, 8)), mx.zeros((1, 3, 2), dtype=mx.uint32)).shape == (1, 3, 2, 8), (
        f"{switch.__name__} returns another shape than [..., top_k, width]"
    )


def test_a_switch_modules_weights_are_switch_linears_with_experts_on_axis_0() -> None:
    module = SwitchGLU(32, 64, 4, bias=True)
    nn.quantize(module, group_size=32, bits=4)
    children = module.children()
    assert {"gate_proj", "up_proj", "down_proj"} <= children.keys(), "SwitchGLU's projections have other names"
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert isinstance(children[name], (QuantizedSwitchLinear, SwitchLinear))
        assert all(array.shape[0] == 4 for _, array in tree_flatten(children[name].parameters())), (
            "an array of a switch linear has its experts on another axis than 0"
        )


def test_load_model_is_lazy() -> None:
    mx.clear_cache()
    before = mx.get_active_memory()
    model, config = load_model(demo_folder(), lazy=True)
    assert mx.get_active_memory() - before < 100_000, "load_model(lazy=True) reads weights: banks would come too late"
    assert config["model_type"] == "qwen3_moe"
    assert not model.training, "load_model no longer puts the model in evaluation mode"


def test_sanitize_hands_on_mlx_layout_as_the_same_objects() -> None:
    model, _ = load_model(demo_folder(), lazy=True)
    stored = dict(mx.load(str(demo_folder() / "model.safetensors")))  # type: ignore[arg-type]
    handed_on = model.sanitize(dict(stored))
    assert all(handed_on[name] is array for name, array in stored.items()), (
        "sanitize copies tensors that it does not change: places.py would have to trace all of them"
    )


def test_a_model_keeps_private_arrays_beside_its_parameters() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._freqs = mx.ones(3)

    module = Rotary()
    assert not tree_flatten(module.parameters()), "private arrays have become parameters"
    assert [value for value in module.values() if isinstance(value, mx.array)], (
        "private arrays are no longer among a module's values: loading.py would leave them to the loading thread"
    )


def test_definitions_are_imported_by_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("mine")
    module.Model, module.ModelArgs = object, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlx_lm.models.mine", module)
    assert _get_classes({"model_type": "mine"}) == (object, dict), "register() no longer puts it where mlx-lm looks"


def test_adapters_are_put_on_by_load_adapters() -> None:
    assert list(inspect.signature(load_adapters).parameters)[:2] == ["model", "adapter_path"]


def test_an_unknown_type_is_a_value_error_that_says_not_supported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"x": mx.zeros(1)})
    with pytest.raises(ValueError, match="not supported"):
        load_model(tmp_path)


class Recorder(nn.Module):
    """A model that notes how many tokens each call has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [0]
        self.calls: Any = []

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.calls.append(tokens.shape[1])
        keys = mx.zeros((1, 1, tokens.shape[1], 8))
        cache[0].update_and_fetch(keys, keys)
        return mx.zeros((1, tokens.shape[1], 10))


def test_mlx_lm_still_divides_a_prompt_as_we_do() -> None:
    model = Recorder()
    next(generate_step(mx.arange(5000), model, max_tokens=1))
    assert model.calls[:4] == [2048, 2048, 903, 1], (
        "generate_step divides a prompt in another way: decode.py follows it"
    )


def test_caches_have_what_we_use() -> None:
    cache = make_prompt_cache(Recorder())
    assert isinstance(cache[0], KVCache)
    keys = mx.zeros((1, 1, 5, 8))
    cache[0].update_and_fetch(keys, keys)
    assert cache[0].nbytes == 2 * 256 * 8 * 4, "KVCache grows in other steps: the plan counts them"
    assert cache[0].state is not None
    assert can_trim_prompt_cache(cache)
    assert trim_prompt_cache(cache, 2) == 2
    assert cache[0].offset == 3


def test_the_tokenizer_wrapper_has_what_we_use(stock_demo: tuple[Any, Any]) -> None:
    tokenizer = stock_demo[1]
    one, two = tokenizer.detokenizer, tokenizer.detokenizer
    one.add_token(tokenizer.encode("word")[0])
    assert two.text == "", "detokenizers of one tokenizer share their state: streams could not interleave"
    twin = copy.copy(one)
    twin.finalize()
    assert one.last_segment is not None, "a detokenizer can no longer be copied and finished on the side"
    assert isinstance(tokenizer.eos_token_ids, set)
    assert tokenizer.has_chat_template is False


def test_logits_processors_write_into_their_argument() -> None:
    (process,) = make_logits_processors(repetition_penalty=2.0)
    logits = mx.ones((1, 4))
    process(mx.array([1]), logits)
    assert logits[0, 1].item() == 0.5, "processors no longer write in place: sampling.py need not copy any more"


def test_an_evaluated_array_can_be_written_through_a_memoryview(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(1, 17)))
    for dtype in (mx.uint32, mx.float32, mx.bfloat16, mx.float16, mx.uint8):
        array = mx.zeros((2, 4), dtype=dtype)
        mx.eval(array)
        view = memoryview(array).cast("B")  # type: ignore[arg-type]
        assert not view.readonly
        assert view.nbytes == array.nbytes
        descriptor = os.open(tmp_path / "bytes", os.O_RDONLY)
        os.preadv(descriptor, [view[: array.nbytes // 2]], 0)
        os.close(descriptor)
        assert mx.any(array[0].view(mx.uint8) != 0), f"{dtype}: MLX does not see bytes written through a memoryview"
        assert not mx.any(array[1].view(mx.uint8) != 0)


def test_fresh_arrays_do_not_share_memory() -> None:
    one, two = mx.zeros((4, 4)), mx.zeros((4, 4))
    mx.eval(one, two)
    memoryview(one).cast("B")[0] = 255  # type: ignore[arg-type]
    assert not mx.any(two != 0), "two arrays of zeros share one buffer: a bank would overwrite another"


def test_a_mask_is_asked_of_a_cache_by_tokens_return_array_and_window_size() -> None:
    asked = []

    class Asked:
        def make_mask(self, *args: Any, **options: Any) -> str:
            asked.append((args, options))
            return "a mask"

    mask = create_attention_mask(mx.zeros((1, 5, 8)), Asked(), window_size=3, return_array=True)
    assert mask == "a mask", "create_attention_mask no longer leaves the mask to the cache: window.py makes it there"
    assert asked == [((5,), {"return_array": True, "window_size": 3})], "make_mask is called with other arguments"


def test_the_mask_of_an_unbounded_cache_is_made_by_create_attention_mask_of_the_cache_module() -> None:
    parameters = list(inspect.signature(mlx_lm.models.cache.create_attention_mask).parameters)
    assert parameters == ["N", "offset", "return_array", "window_size"], "window.py calls it by place"
    cache = KVCache()
    assert cache.make_mask(5, return_array=False, window_size=None) == "causal"
    assert cache.make_mask(1, return_array=True, window_size=None) is None


def test_a_cache_without_bits_gets_the_attention_of_plain_rows() -> None:
    rows = mx.random.normal((1, 2, 3, 32))
    out = scaled_dot_product_attention(rows, rows, rows, cache=SlidingWindowKVCache(kv_bits=8), scale=1.0, mask=None)
    plain = mx.fast.scaled_dot_product_attention(rows, rows, rows, scale=1.0, mask=None)
    assert mx.array_equal(out, plain), "the attention for quantised rows is chosen by something else than cache.bits"


def test_caches_in_one_layer_are_in_a_cache_list() -> None:
    inner = KVCache()
    assert CacheList(inner).caches[0] is inner, "CacheList keeps its caches elsewhere: layers.py walks them"


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.3},
        {"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": 1.0, "long_factor": 3.0},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
        {"rope_type": "mrope", "mrope_section": [4, 6, 6]},
    ],
)
@pytest.mark.parametrize("traditional", [False, True])
def test_every_rotation_of_mlx_lm_is_moved_by_its_own_frequencies(scaling: Any, traditional: bool) -> None:
    rope = initialize_rope(32, 1000.0, traditional, scaling, max_position_embeddings=256)
    rows = mx.random.normal((1, 2, 3, 48), key=mx.random.key(0))
    rotation = Rotation.of(rope, "keys")
    assert rotation is not None, f"{type(rope).__name__} keeps its frequencies under other names"
    moved = rotation.moved(rope(rows, offset=200), -150)
    assert mx.abs(moved - rope(rows, offset=50)).max().item() < 1e-4, f"{type(rope).__name__} rotates in another way"


def test_the_rotary_modules_are_those_that_are_tested() -> None:
    kinds = {
        name for name, kind in vars(mlx_lm.models.rope_utils).items() if isinstance(kind, type) and "RoPE" in name
    }
    known = {"DynamicNTKScalingRoPE", "Llama3RoPE", "ProportionalRoPE", "SuScaledRoPE", "YarnRoPE"}
    assert kinds == known, "a rotation that nobody has looked at: can its positions be moved?"
