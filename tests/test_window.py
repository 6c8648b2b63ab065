"""The sliding-window cache against its definition, whatever calls a text is divided into."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from attention import WIDTH, Attention
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.rope_utils import (
    DynamicNTKScalingRoPE,
    Llama3RoPE,
    ProportionalRoPE,
    SuScaledRoPE,
    YarnRoPE,
)

from mlxmoe.errors import WindowError
from mlxmoe.kv.packing import Packing
from mlxmoe.kv.positions import Positions, Rotation
from mlxmoe.kv.window import SlidingWindowKVCache

TOKENS = 70

# Beyond the window rows are summed in another order than the reference has them; and a rotation in two steps rounds
# twice. Outputs are of the size of 1, in float32.
ROUNDING = 2e-5

ROPES: dict[str, Any] = {
    "plain": nn.RoPE(WIDTH),
    "traditional": nn.RoPE(WIDTH, traditional=True, base=500.0),
    "partial": nn.RoPE(WIDTH // 2),
    "linear": nn.RoPE(WIDTH, scale=0.25),
    "yarn": YarnRoPE(WIDTH, scaling_factor=4.0, original_max_position_embeddings=16, mscale=1.5),
    "llama3": Llama3RoPE(WIDTH, base=500.0, scaling_config={"factor": 4.0, "original_max_position_embeddings": 32}),
    "su": SuScaledRoPE(
        WIDTH, max_position_embeddings=64, original_max_position_embeddings=16, long_factor=[2.0] * (WIDTH // 2)
    ),
    "proportional": ProportionalRoPE(WIDTH, WIDTH // 2),
}

windows = st.integers(2, 40).flatmap(lambda window: st.tuples(st.just(window), st.integers(0, window - 1)))
divisions = st.one_of(
    st.sets(st.integers(1, TOKENS - 1)),  # many small calls
    st.sets(st.integers(1, TOKENS - 1), max_size=4),  # a few large ones
    st.integers(1, TOKENS - 1).map(lambda first: set(range(first, TOKENS))),  # a prompt, then token by token
).map(sorted)


def largest(difference: mx.array) -> float:
    return float(mx.abs(difference).max().item())


@given(windows, divisions)
def test_every_division_attends_to_the_sinks_and_the_last_tokens(shape: tuple[int, int], cuts: list[int]) -> None:
    layer = Attention.of(TOKENS, ROPES["plain"])
    found = layer.run(SlidingWindowKVCache(*shape), cuts)
    assert largest(found - layer.expected(*shape)) < ROUNDING


@given(windows, divisions)
def test_up_to_the_window_it_is_the_unbounded_cache_to_the_bit(shape: tuple[int, int], cuts: list[int]) -> None:
    layer = Attention.of(TOKENS, ROPES["plain"])
    found, unbounded = layer.run(SlidingWindowKVCache(*shape), cuts), layer.run(KVCache(), cuts)
    assert mx.array_equal(found[:, : shape[0]], unbounded[:, : shape[0]])


@given(divisions)
def test_without_a_window_it_is_the_unbounded_cache_to_the_bit(cuts: list[int]) -> None:
    layer = Attention.of(TOKENS, ROPES["plain"])
    assert mx.array_equal(layer.run(SlidingWindowKVCache(), cuts), layer.run(KVCache(), cuts))


@given(windows, divisions, st.integers(0, TOKENS))
def test_what_is_stored_does_not_depend_on_the_division(shape: tuple[int, int], cuts: list[int], end: int) -> None:
    layer = Attention.of(TOKENS, ROPES["plain"])
    one, other = SlidingWindowKVCache(*shape), SlidingWindowKVCache(*shape)
    layer.run(one, cuts)
    layer.run(other, [])
    kept = min(shape[0], TOKENS)
    assert mx.array_equal(one.keys[:, :, :kept], other.keys[:, :, :kept])
    assert mx.array_equal(one.values[:, :, :kept], other.values[:, :, :kept])


@pytest.mark.parametrize("rope", ROPES)
@settings(max_examples=12)
@example(shape=(38, 37), cuts=[], trained=40)  # nearly all sinks
@given(shape=windows, cuts=divisions, trained=st.integers(40, 60))
def test_beyond_the_trained_context_positions_go_back_in_steps(
    rope: str, shape: tuple[int, int], cuts: list[int], trained: int
) -> None:
    layer = Attention.of(TOKENS, ROPES[rope])
    positions = Positions.within(trained, *shape)
    cache = moving(ROPES[rope], positions, *shape)
    found = layer.run(cache, cuts)
    # a row may have been turned once for every few tokens, and Su and YaRN make rows larger than 1
    assert largest(found - layer.expected(*shape, trained, positions.step)) < 5 * ROUNDING
    assert cache.offset < trained


@settings(max_examples=20)
@given(shape=windows, cuts=divisions)
def test_a_dynamic_rotation_is_right_where_calls_keep_to_the_room(shape: tuple[int, int], cuts: list[int]) -> None:
    rope = DynamicNTKScalingRoPE(WIDTH, 48, False, 1000.0, 2.0)
    layer, positions = Attention.of(TOKENS, rope), Positions.within(48, *shape)
    cache, parts, begin = moving(rope, positions, *shape), [], 0
    for end in [*cuts, TOKENS]:
        while begin < end:
            stop = min(end, begin + (cache.room or 0))
            parts.append(layer.call(cache, begin, stop))
            begin = stop
    expected = layer.expected(*shape, 48, positions.step)
    assert largest(mx.concatenate(parts, axis=1) - expected) < 5 * ROUNDING


@given(st.integers(2, 150), st.integers(0, 150), st.integers(20, 100))
def test_no_position_passes_the_trained_context(window: int, sinks: int, trained: int) -> None:
    sinks = min(sinks, window - 1, trained - 1)
    positions = Positions.within(trained, window, sinks)
    places = [token - positions.back(token) for token in range(300)]
    assert places[:trained] == list(range(trained))
    assert all(sinks <= place < trained for place in places[trained:])
    if sinks <= Positions.most_sinks(trained):
        assert positions.step >= trained // 8


@pytest.mark.parametrize("window", [2**31, 2**31 + 5, 2**64])
def test_a_window_may_be_larger_than_the_numbers_that_mlx_has(window: int) -> None:
    rope, cuts = ROPES["plain"], [30, 31, 50]
    layer = Attention.of(TOKENS, rope)
    expected = layer.run(moving(rope, Positions.within(24, 1000, 4), 1000, 4), cuts)
    assert mx.array_equal(layer.run(moving(rope, Positions.within(24, window, 4), window, 4), cuts), expected)
    assert mx.array_equal(layer.run(SlidingWindowKVCache(window, window - 1), cuts), layer.run(KVCache(), cuts))


def moving(rope: Any, positions: Positions, window: int, sinks: int, bits: int | None = None) -> SlidingWindowKVCache:
    rotation = Rotation.of(rope, "keys")
    return SlidingWindowKVCache(window, sinks, kv_bits=bits, positions=positions, rotation=rotation)


# --- quantised --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=25)
@given(shape=st.one_of(windows, st.just((None, 0))), cuts=divisions)
def test_quantised_rows_are_what_quantising_them_gives(
    bits: int, shape: tuple[int | None, int], cuts: list[int]
) -> None:
    layer = Attention.of(TOKENS, lambda rows, offset: rows)  # so that the reference can quantise what is cached
    cache = SlidingWindowKVCache(*shape, kv_bits=bits)
    found = layer.run(cache, cuts)
    packing = Packing(WIDTH, bits)
    layer.keys, layer.values = (packing.unpack(packing.pack(rows)) for rows in (layer.keys, layer.values))
    assert largest(found - layer.expected(shape[0] or TOKENS, shape[1])) < ROUNDING


@settings(max_examples=25)
@given(shape=windows, cuts=divisions, trained=st.integers(41, 60))
def test_quantised_rows_that_move_stay_close(shape: tuple[int, int], cuts: list[int], trained: int) -> None:
    layer, positions = Attention.of(TOKENS, ROPES["plain"]), Positions.within(trained, *shape)
    exact = layer.expected(*shape, trained, positions.step)
    found = layer.run(moving(ROPES["plain"], positions, *shape, 8), cuts)
    assert largest(found - exact) < 0.1  # 8 bits hold rows of about +-3 to 0.01; a wrong position is off by 1


@pytest.mark.parametrize("width", [16, 32, 64, 80, 96, 128, 0])
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_any_width_can_be_packed(width: int, bits: int) -> None:
    rows = mx.random.normal((1, 2, 5, width))
    packing = Packing(width, bits)
    unpacked = packing.unpack(packing.pack(rows))
    assert unpacked.shape == rows.shape
    assert width == 0 or largest(unpacked - rows) < 8 / 2**bits


# --- memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_memory_is_rows_for_the_window_and_never_allocated_again(bits: int | None) -> None:
    layer = Attention.of(900, ROPES["plain"])
    cache = SlidingWindowKVCache(300, 4, kv_bits=bits)
    layer.call(cache, 0, 10)
    row_bytes = cache.row_bytes
    assert cache.nbytes == 256 * row_bytes
    layer.call(cache, 10, 700)
    assert cache.nbytes == 300 * row_bytes == sum(a.nbytes for _, a in tree_flatten(cache.state) if is_array(a))
    layer.call(cache, 700, 701)
    before = addresses(cache)
    for token in range(701, 760):
        layer.call(cache, token, token + 1)
    assert addresses(cache) == before
    assert cache.nbytes == 300 * row_bytes
    assert cache.size() == 300


def is_array(value: Any) -> bool:
    return isinstance(value, mx.array)


def addresses(cache: SlidingWindowKVCache) -> set[int]:
    arrays = [array for rows in cache._rows.values() for array in rows]
    return {np.frombuffer(memoryview(array).cast("B"), dtype=np.uint8).ctypes.data for array in arrays}


# --- guarded ----------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(0, 45))
def test_trimming_and_going_on_is_as_if_the_rest_had_not_been_said(seen: int, forget: int) -> None:
    layer = Attention.of(TOKENS, ROPES["plain"])
    cache = SlidingWindowKVCache(40, 4)
    layer.call(cache, 0, seen)
    assert cache.is_trimmable()
    gone = cache.trim(forget)
    assert gone == min(forget, seen)
    assert cache.offset == seen - gone
    fresh = SlidingWindowKVCache(40, 4)
    if seen > gone:
        layer.call(fresh, 0, seen - gone)
    assert mx.array_equal(layer.run(cache, []), layer.run(fresh, []))


def test_trimming_across_a_step_of_positions_turns_the_rows_back() -> None:
    rope, positions = ROPES["plain"], Positions.within(24, 40, 4)  # a window beyond the trained context
    layer = Attention.of(TOKENS, rope)
    cache = moving(rope, positions, 40, 4)
    layer.call(cache, 0, 30)
    layer.call(cache, 30, 36)
    assert cache.trim(16) == 16
    found = layer.run(cache, [])
    assert largest(found - layer.expected(40, 4, 24, positions.step)[:, 20:]) < ROUNDING


def test_trimming_is_refused_once_something_is_gone() -> None:
    layer = Attention.of(TOKENS, ROPES["plain"])
    cache = SlidingWindowKVCache(16, 4)
    layer.call(cache, 0, 16)
    assert cache.is_trimmable()
    layer.call(cache, 16, 17)
    before = [array for _, array in tree_flatten(cache.state) if is_array(array)]
    assert not cache.is_trimmable()
    assert cache.trim(1) == 0
    after = [array for _, array in tree_flatten(cache.state) if is_array(array)]
    assert cache.offset == 17
    assert all(mx.array_equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("seen", [10, 50])
def test_a_copy_goes_its_own_way(bits: int | None, seen: int) -> None:
    layer, other_text = Attention.of(TOKENS, ROPES["plain"]), Attention.of(TOKENS, ROPES["plain"], seed=1)
    cache = SlidingWindowKVCache(16, 4, kv_bits=bits)
    layer.call(cache, 0, seen)
    branch = copy.deepcopy(cache)
    expected = layer.run(copy.deepcopy(cache), range(seen, TOKENS))
    other_text.run(branch, range(seen, TOKENS))
    assert mx.array_equal(layer.run(cache, range(seen, TOKENS)), expected)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("seen", [0, 2, 10, 50, 65])
@pytest.mark.parametrize("moves", [False, True])
def test_a_stored_state_goes_on_as_the_cache_would_have(bits: int | None, seen: int, moves: bool) -> None:
    rope = ROPES["yarn"]
    layer = Attention.of(TOKENS, rope)
    cache = (
        moving(rope, Positions.within(48, 30, 4), 30, 4, bits) if moves else SlidingWindowKVCache(30, 4, kv_bits=bits)
    )
    if seen:
        layer.call(cache, 0, seen)
    stored = [(path, copy.deepcopy(leaf)) for path, leaf in tree_flatten(cache.state)]  # as mlx-lm stores it
    again = SlidingWindowKVCache.from_state(tree_unflatten(stored))
    assert (again.nbytes, again.offset, again.window, again.sinks) == (cache.nbytes, cache.offset, 30, 4)
    assert mx.array_equal(layer.run(again, range(seen, TOKENS)), layer.run(cache, range(seen, TOKENS)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 4}, r"window=4 is too small .* 4 sinks .* 5 or more"),
        ({"window": 1, "sinks": 0}, "2 or more"),
        ({"window": 2.5}, r"window=2\.5"),
        ({"window": True}, "window=True"),
        ({"window": 8, "sinks": -1}, "sinks=-1"),
        ({"kv_bits": 3}, "kv_bits=3 is not offered: 8, 4"),
        ({"kv_bits": "8"}, "kv_bits='8'"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(WindowError, match=said):
        SlidingWindowKVCache(**options)


def test_a_layer_with_a_window_of_its_own_gets_the_narrower_mask() -> None:
    layer = Attention.of(TOKENS, ROPES["plain"])
    for seen, more in ((0, 10), (10, 30), (40, 1), (40, 12)):
        cache = SlidingWindowKVCache(16, 4)
        if seen:
            layer.call(cache, 0, seen)
        wide, narrow = cache.make_mask(more, return_array=True), cache.make_mask(more, window_size=5)
        assert narrow.sum(-1).max().item() <= 5
        if wide is not None and not isinstance(wide, str):
            assert not mx.any(narrow & ~wide)


def test_a_batch_of_texts_of_one_length_runs_as_each_by_itself(stock_demo: tuple[Any, Any]) -> None:
    model, _ = stock_demo
    texts = mx.random.randint(0, 2048, (2, 40), key=mx.random.key(3))

    def run(rows: mx.array) -> mx.array:
        cache = [SlidingWindowKVCache(16, 4) for _ in make_prompt_cache(model)]
        parts = [model(rows[:, begin : begin + 8], cache=cache) for begin in range(0, 40, 8)]
        return mx.concatenate(parts, axis=1)

    both = run(texts)
    assert all(largest(both[i] - run(texts[i : i + 1])[0]) < 1e-3 for i in range(2))


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("seen", [10, 50])
def test_a_cache_of_a_live_state_and_its_giver_go_their_own_ways(bits: int | None, seen: int) -> None:
    layer, other_text = Attention.of(TOKENS, ROPES["plain"]), Attention.of(TOKENS, ROPES["plain"], seed=1)
    cache = SlidingWindowKVCache(16, 4, kv_bits=bits)
    layer.call(cache, 0, seen)
    expected = layer.run(copy.deepcopy(cache), range(seen, TOKENS))
    again = SlidingWindowKVCache.from_state(cache.state)
    other_text.run(again, range(seen, TOKENS))  # one by one: in place
    assert mx.array_equal(layer.run(cache, range(seen, TOKENS)), expected)


def test_what_is_kept_of_a_long_call_is_made_with_what_it_hands_out() -> None:
    """Otherwise the rows of every layer would wait until the last one has computed."""
    cache = SlidingWindowKVCache(16, 4)
    handed = cache.update_and_fetch(*mx.random.normal((2, 1, 2, 40, WIDTH)))
    mx.eval(handed)
    with ThreadPoolExecutor(1) as pool:  # where nothing that was built here can be made any more
        assert pool.submit(cache.keys.tolist).result()
        assert pool.submit(cache.values.tolist).result()
