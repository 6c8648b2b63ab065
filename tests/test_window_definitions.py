"""Every definition of mlx-lm with a window, with bits and beyond its trained context, against an explicit mask."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from definitions import DEFINITIONS
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from mlxmoe.errors import UnsupportedModelError
from mlxmoe.kv.choose import KVChoice, choose
from mlxmoe.kv.layers import find_kv_layers, leaves_of
from mlxmoe.kv.packing import Packing
from mlxmoe.kv.settings import KVSettings
from mlxmoe.kv.window import SlidingWindowKVCache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernels_without_metal")]

WINDOW, SINKS = 24, 3
TOKENS = [(37 * i * i + 11 * i + 5) % 2048 for i in range(70)]
DIVISIONS = {"mixed": [10, 11, 12, 30, 31, 32, 33, 55, 56, 57, 58], "one": [], "two": [40], "single": range(9, 40)}

# Rows of the window are summed in another order than those of the whole text. muse_spark computes in bfloat16.
ROUNDING = {"muse_spark": 4e-3}
DEFAULT_ROUNDING = 3e-5

REFUSED = {"deepseek_v32", "deepseek_v41", "glm_moe_dsa", "minimax_m3_vl"}

# Where positions stay as the text has them, and why; the others' are moved, or they have none.
FIXED = {
    "bailing_hybrid": "several rotations",
    "bailing_moe_linear": "several rotations",
    "deepseek_v2": "changed before it is cached",
    "gemma4": "rotates what is in no cache",
    "gemma4_text": "rotates what is in no cache",
    "hunyuan": "changed before it is cached",
    "llama4": "a way of its own",
}
PLACELESS = {"afmoe", "exaone_moe", "jamba", "kimi_k3", "kimi_linear", "muse_spark", "nemotron_h"}
MOVABLE = set(DEFINITIONS) - REFUSED - set(FIXED) - PLACELESS


class Explicit(KVCache):
    """All keys and values for good, quantised where asked, with the window's definition as a mask."""

    def __init__(self, window: int, sinks: int, bits: int | None) -> None:
        super().__init__()
        self.window, self.sinks, self.packing_bits = window, sinks, bits

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:  # noqa: N803
        asking, tokens = mx.arange(self.offset, self.offset + N)[:, None], mx.arange(self.offset + N)[None]
        return (tokens <= asking) & ((tokens < self.sinks) | (asking - tokens < self.window - self.sinks))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        packings = [Packing(rows.shape[3], self.packing_bits) for rows in (keys, values)]
        rows = (p.unpack(p.pack(rows)) for p, rows in zip(packings, (keys, values), strict=True))
        return super().update_and_fetch(*rows)


def chosen(model: Any, trained: int | None = None, **settings: Any) -> KVChoice:
    return choose(model, KVSettings(**settings), trained)


def explicit_caches(model: Any, window: int, sinks: int, bits: int | None) -> list[Any]:
    def replaced(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(replaced(part) for part in cache.caches))
        return Explicit(window, sinks, bits) if type(cache) is KVCache else cache

    return [replaced(cache) for cache in make_prompt_cache(model)]


def logits(model: Any, caches: list[Any], cuts: Sequence[int], tokens: Sequence[int] = TOKENS) -> mx.array:
    parts, begin = [], 0
    for end in [*cuts, len(tokens)]:
        parts.append(model(mx.array([tokens[begin:end]]), cache=caches)[0])
        mx.eval(parts, [cache.state for cache in caches])
        begin = end
    return mx.concatenate(parts)


def largest(difference: mx.array) -> float:
    return float(mx.abs(difference).max().item())


@pytest.mark.parametrize("name", sorted(set(DEFINITIONS) - REFUSED))
def test_a_window_is_what_an_explicit_mask_gives(model_of: Callable[[str], Any], name: str) -> None:
    model, rounding = model_of(name), ROUNDING.get(name, DEFAULT_ROUNDING)
    expected = logits(model, explicit_caches(model, WINDOW, SINKS, None), DIVISIONS["mixed"])
    stock = logits(model, make_prompt_cache(model), DIVISIONS["mixed"])
    assert largest(expected - stock) > 100 * rounding, "the window must make a difference to be seen"
    choice = chosen(model, window=WINDOW, sinks=SINKS)
    found = {name: logits(model, choice.caches(model), cuts) for name, cuts in DIVISIONS.items()}
    assert all(largest(rows - expected) < rounding for rows in found.values())
    assert mx.array_equal(found["mixed"][:WINDOW], stock[:WINDOW])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", sorted(set(DEFINITIONS) - REFUSED))
def test_bits_are_what_quantised_rows_give(model_of: Callable[[str], Any], name: str, bits: int) -> None:
    model, rounding = model_of(name), ROUNDING.get(name, DEFAULT_ROUNDING)
    for window in (None, WINDOW):
        expected = logits(model, explicit_caches(model, window or 2**20, SINKS, bits), DIVISIONS["mixed"])
        found = logits(
            model, chosen(model, window=window, sinks=SINKS, kv_bits=bits).caches(model), DIVISIONS["mixed"]
        )
        # a number that rounding moves across the border between two levels is off by a whole level
        assert mx.abs(found - expected).mean().item() < 5 * rounding
        assert largest(found - expected) < 200 * rounding


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_right_is_refused_by_name(model_of: Callable[[str], Any], name: str) -> None:
    model = model_of(name)
    for settings in ({"window": WINDOW}, {"kv_bits": 8}):
        with pytest.raises(UnsupportedModelError, match=name):
            chosen(model, **settings)
    assert len(chosen(model).caches(model)) == len(make_prompt_cache(model))


@pytest.mark.parametrize("name", sorted(set(DEFINITIONS) - REFUSED))
def test_only_unbounded_layers_are_replaced(model_of: Callable[[str], Any], name: str) -> None:
    model = model_of(name)
    theirs = [type(leaf) for leaf in leaves_of(make_prompt_cache(model))]
    ours = [type(leaf) for leaf in leaves_of(chosen(model, window=WINDOW).caches(model))]
    assert ours == [SlidingWindowKVCache if kind is KVCache else kind for kind in theirs]
    assert SlidingWindowKVCache in ours


@pytest.mark.parametrize("name", sorted(MOVABLE))
def test_positions_stay_in_the_trained_context_however_the_text_is_divided(
    model_of: Callable[[str], Any], name: str
) -> None:
    model, trained = model_of(name), 40
    choice = chosen(model, trained, window=WINDOW, sinks=SINKS)
    assert choice.endless
    text = [*TOKENS, *reversed(TOKENS), *TOKENS]
    found = []
    for cuts in (range(32, 210, 16), [*range(32, 64), 130, 131, 132, 140], range(20, 210, 19)):
        caches = choice.caches(model)
        found.append(logits(model, caches, cuts, text))
        ours = [leaf for leaf in leaves_of(caches) if isinstance(leaf, SlidingWindowKVCache)]
        assert all(leaf.offset <= trained for leaf in ours)
    assert largest(found[0] - found[1]) < 2 * DEFAULT_ROUNDING
    assert largest(found[0] - found[2]) < 2 * DEFAULT_ROUNDING
    absolute = logits(model, chosen(model, None, window=WINDOW, sinks=SINKS).caches(model), [], text)
    assert mx.array_equal(found[0][:24], absolute[:24]) or largest(found[0][:40] - absolute[:40]) < DEFAULT_ROUNDING
    assert largest(found[0][40:] - absolute[40:]) > 100 * DEFAULT_ROUNDING, "the sinks are nearer than in the text"


@pytest.mark.parametrize("name", sorted(FIXED))
def test_positions_that_cannot_be_moved_are_said_to_count_on(
    model_of: Callable[[str], Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="mlxmoe"):
        choice = chosen(model_of(name), 40, window=WINDOW)
    assert choice.positions is None
    assert not choice.endless
    assert f"The positions of {name}" in caplog.text
    assert FIXED[name] in caplog.text


@pytest.mark.parametrize("name", sorted(PLACELESS))
def test_layers_without_positions_need_none_moved(
    model_of: Callable[[str], Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    choice = chosen(model_of(name), 40, window=WINDOW)
    assert choice.positions is None
    assert choice.endless
    assert caplog.text == ""


def test_listening_leaves_the_model_as_it_was(model_of: Callable[[str], Any]) -> None:
    model = copy.deepcopy(model_of("qwen3_moe"))
    kinds = [type(module) for module in model.modules()]
    find_kv_layers(model)
    assert [type(module) for module in model.modules()] == kinds
