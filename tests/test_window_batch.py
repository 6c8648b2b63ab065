"""Texts in one batch: each is what it would be alone, whoever joins and leaves, and however long the others are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from attention import WIDTH, Attention
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE, YarnRoPE

from mlxmoe.errors import UnsupportedModelError, WindowError
from mlxmoe.kv.batch import BatchSlidingWindowKVCache
from mlxmoe.kv.positions import Positions, Rotation
from mlxmoe.kv.window import SlidingWindowKVCache

TOKENS = 90
WINDOW, SINKS = 24, 3

# Sums over a batch may be taken in another order than those of one text: mostly they are not, and nothing differs.
# Relative to the largest number.
ROUNDING = 1e-4
ROPES: dict[str, Any] = {
    "plain": nn.RoPE(WIDTH),
    "yarn": YarnRoPE(WIDTH, scaling_factor=4.0, original_max_position_embeddings=16, mscale=1.5),
}


def far(found: mx.array, expected: mx.array) -> float:
    assert found.shape == expected.shape
    return float((mx.abs(found - expected).max() / mx.abs(expected).max()).item())


@dataclass
class Text:
    """A text with a cache of its own, beside the one in the batch."""

    layer: Attention
    alone: SlidingWindowKVCache
    seen: int = 0

    def go_on(self, tokens: int, cache: SlidingWindowKVCache | None = None) -> mx.array:
        return self.layer.call(cache or self.alone, self.seen, self.seen + tokens)


@dataclass
class Batch:
    """Texts of one layer that decode together and are checked against each alone after every call."""

    rope: Any
    kind: Callable[[], SlidingWindowKVCache]
    texts: list[Text] = field(default_factory=list)
    cache: BatchSlidingWindowKVCache = field(default_factory=lambda: SlidingWindowKVCache.merge([]))
    made: int = 0

    def join(self, tokens: int) -> None:
        text = Text(Attention.of(TOKENS, self.rope, seed=self.made), self.kind())
        self.made += 1
        if tokens:
            text.go_on(tokens)
            text.seen = tokens
        self.texts.append(text)
        self.cache.extend(SlidingWindowKVCache.merge([text.alone]))

    def leave(self, index: int) -> None:
        index %= len(self.texts)
        gone, text = self.cache.extract(index), self.texts.pop(index)
        self.cache.filter([i for i in range(len(self.texts) + 1) if i != index])
        assert far(text.go_on(3, gone), text.go_on(3)) < ROUNDING

    def call(self, counts: list[int]) -> None:
        """The next `counts` tokens of each text, filled up on the right where they differ."""
        most = max(counts)
        if min(counts) < most:
            self.cache.prepare(lengths=counts, right_padding=[most - count for count in counts])
        queries, keys, values = (
            mx.concatenate(
                [self._rows(text, name, count, most) for text, count in zip(self.texts, counts, strict=True)]
            )
            for name in ("queries", "keys", "values")
        )
        mask = create_attention_mask(mx.zeros((1, most, 1)), self.cache)
        assert not isinstance(mask, mx.array) or mx.all(mx.any(mask, axis=-1)), "no softmax over nothing"
        offset = self.cache.offset
        keys, values = self.cache.update_and_fetch(self.rope(keys, offset=offset), values)
        out = scaled_dot_product_attention(
            self.rope(queries, offset=offset), keys, values, cache=self.cache, scale=WIDTH**-0.5, mask=mask
        )
        mx.eval(out, self.cache.state)
        assert mx.all(mx.isfinite(out)), "what fills up must not spoil what the layers after this one compute"
        self.cache.finalize()
        for row, text, count in zip(out, self.texts, counts, strict=True):
            if count:
                assert far(row[:, :count], text.go_on(count)) < ROUNDING
                text.seen += count
        self.check()

    def check(self) -> None:
        """What is stored is what each text stores alone, to the bit."""
        alone = [text.alone for text in self.texts]
        assert self.cache.nbytes == sum(cache.nbytes for cache in alone)
        assert self.cache.size() == max(cache.size() for cache in alone)
        assert self.cache.offset.tolist() == [cache.offset for cache in alone]
        for i, cache in enumerate(alone):
            found = self.cache.extract(i)
            assert (found.seen, found.window, found.sinks) == (cache.seen, cache.window, cache.sinks)
            for (_, ours), (_, theirs) in zip(tree_flatten(found.state), tree_flatten(cache.state), strict=True):
                assert mx.array_equal(ours, theirs) if isinstance(ours, mx.array) else ours == theirs

    @staticmethod
    def _rows(text: Text, name: str, count: int, most: int) -> mx.array:
        rows = getattr(text.layer, name)[..., text.seen : text.seen + count, :]
        return mx.pad(rows, [(0, 0), (0, 0), (0, most - count), (0, 0)], constant_values=7.0)


def kind(rope: Any, window: int | None, sinks: int, bits: int | None, trained: int | None) -> SlidingWindowKVCache:
    if trained is None or window is None or trained <= sinks:
        return SlidingWindowKVCache(window, sinks, kv_bits=bits)
    positions = Positions.within(trained, window, sinks)
    return SlidingWindowKVCache(window, sinks, kv_bits=bits, positions=positions, rotation=Rotation.of(rope, "keys"))


steps = st.one_of(
    st.tuples(st.just("decode"), st.integers(1, 6)),
    st.tuples(st.just("join"), st.integers(0, 70)),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("together"), st.integers(2, 20)),
    st.tuples(st.just("padded"), st.lists(st.integers(0, 20), min_size=5, max_size=5)),
)


@settings(max_examples=100)
@given(
    rope=st.sampled_from(sorted(ROPES)),
    window=st.one_of(st.none(), st.integers(2, 40)),
    sinks=st.integers(0, 6),
    bits=st.sampled_from([None, 8, 4]),
    trained=st.one_of(st.none(), st.integers(20, 60)),
    starts=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    plan=st.lists(steps, min_size=1, max_size=7),
)
def test_each_text_is_what_it_is_alone_whoever_joins_and_leaves(
    rope: str,
    window: int | None,
    sinks: int,
    bits: int | None,
    trained: int | None,
    starts: list[int],
    plan: list[tuple[str, Any]],
) -> None:
    sinks = sinks if window is None else min(sinks, window - 1)
    batch = Batch(ROPES[rope], lambda: kind(ROPES[rope], window, sinks, bits, trained))
    for start in starts:
        batch.join(start)
    for step, how in plan:
        room = TOKENS - 3 - max(text.seen for text in batch.texts)
        if step == "join" and len(batch.texts) < 5:
            batch.join(how)
        elif step == "leave" and len(batch.texts) > 1:
            batch.leave(how)
        elif step == "decode":
            for _ in range(min(how, room)):
                batch.call([1] * len(batch.texts))
        elif step == "together" and room > 0:
            batch.call([min(how, room)] * len(batch.texts))
        elif step == "padded" and room > 0:
            counts = [min(count, room) for count in how[: len(batch.texts)]]
            if any(counts):
                batch.call(counts)
    while batch.texts:
        batch.leave(0)


def test_texts_that_end_with_as_many_rows_but_begin_elsewhere_have_masks_of_their_own() -> None:
    batch = Batch(ROPES["plain"], lambda: SlidingWindowKVCache(WINDOW, SINKS))
    batch.join(5)
    batch.join(8)
    batch.call([4, 1])


def test_texts_may_leave_between_two_padded_calls() -> None:
    batch = SlidingWindowKVCache.merge([filled(5), filled(60), filled(7)])
    batch.prepare(lengths=[1, 4, 6], right_padding=[5, 2, 0])
    rows = mx.ones((3, 2, 3, WIDTH))
    batch.update_and_fetch(rows, rows)
    batch.filter([2, 1])
    batch.update_and_fetch(rows[:2], rows[:2])
    assert batch.offset.tolist() == [13, 64]


@pytest.mark.parametrize("seen", [10, 50])
def test_texts_with_as_many_rows_need_no_mask_and_get_their_rows_to_the_bit(seen: int) -> None:
    layers = [Attention.of(TOKENS, ROPES["plain"], seed) for seed in range(3)]
    alone = [SlidingWindowKVCache(WINDOW, SINKS) for _ in layers]
    for layer, cache in zip(layers, alone, strict=True):
        layer.call(cache, 0, seen)
    together = Attention(
        ROPES["plain"],
        *(mx.concatenate([getattr(layer, part) for layer in layers]) for part in ("queries", "keys", "values")),
    )
    batch = SlidingWindowKVCache.merge(alone)
    assert batch.make_mask(1) is None
    offset = batch.offset
    keys, values = together.keys[:, :, seen : seen + 1], together.values[:, :, seen : seen + 1]
    keys, values = batch.update_and_fetch(together.rope(keys, offset=offset), values)
    for i, (layer, cache) in enumerate(zip(layers, alone, strict=True)):
        own = [rows[:, :, seen : seen + 1] for rows in (layer.keys, layer.values)]
        theirs = cache.update_and_fetch(layer.rope(own[0], offset=cache.offset), own[1])
        assert mx.array_equal(keys[i], theirs[0][0])
        assert mx.array_equal(values[i], theirs[1][0])


def filled(tokens: int, window: int = WINDOW) -> SlidingWindowKVCache:
    cache = SlidingWindowKVCache(window, SINKS)
    Attention.of(TOKENS, ROPES["plain"], tokens).call(cache, 0, tokens)
    return cache


def test_a_batch_and_what_it_is_made_of_do_not_change_each_other() -> None:
    caches = [filled(tokens) for tokens in (5, 60)]
    before = [mx.array(cache.keys) for cache in caches]
    batch = SlidingWindowKVCache.merge(caches)
    out = batch.extract(1)
    batch.update_and_fetch(mx.ones((2, 2, 1, WIDTH)), mx.ones((2, 2, 1, WIDTH)))
    assert all(mx.array_equal(cache.keys, keys) for cache, keys in zip(caches, before, strict=True))
    assert mx.array_equal(out.keys, before[1])
    assert [cache.seen for cache in (*caches, out)] == [5, 60, 60]
    batch.filter(mx.array([1, 0, 1]))
    assert batch.offset.tolist() == [61, 6, 61]
    batch.extend(batch)
    assert batch.offset.tolist() == [61, 6, 61] * 2


def test_a_stored_state_is_the_same_batch() -> None:
    batch = SlidingWindowKVCache.merge([filled(5), filled(60), SlidingWindowKVCache(WINDOW, SINKS)])
    batch.prepare(lengths=[4, 1, 2], right_padding=[0, 3, 2])
    stored = [(path, copy.deepcopy(leaf)) for path, leaf in tree_flatten(batch.state)]
    again = BatchSlidingWindowKVCache.from_state(tree_unflatten(stored))
    rows = [mx.random.normal((3, 2, 4, WIDTH), key=mx.random.key(seed)) for seed in range(2)]
    assert again.offset.tolist() == batch.offset.tolist()
    assert mx.array_equal(again.make_mask(4), batch.make_mask(4))
    for ours, theirs in zip(again.update_and_fetch(*rows), batch.update_and_fetch(*rows), strict=True):
        assert mx.array_equal(ours, theirs)
    assert again.nbytes == batch.nbytes


def test_a_batch_of_a_live_state_and_its_giver_do_not_change_each_other() -> None:
    batch = SlidingWindowKVCache.merge([filled(5), filled(60)])
    before = [mx.array(batch.extract(i).keys) for i in range(2)]
    again = BatchSlidingWindowKVCache.from_state(batch.state)
    again.update_and_fetch(mx.ones((2, 2, 1, WIDTH)), mx.ones((2, 2, 1, WIDTH)))
    assert all(mx.array_equal(batch.extract(i).keys, keys) for i, keys in enumerate(before))
    assert batch.offset.tolist() == [5, 60]


def test_trimming_takes_from_all_or_from_none() -> None:
    batch = SlidingWindowKVCache.merge([filled(5), filled(20)])
    assert batch.is_trimmable()
    assert batch.trim(3) == 3
    assert batch.offset.tolist() == [2, 17]
    assert batch.trim(9) == 2
    batch.extend(SlidingWindowKVCache.merge([filled(60)]))
    assert not batch.is_trimmable()
    assert batch.trim(1) == 0
    assert batch.offset.tolist() == [0, 15, 60]
    assert SlidingWindowKVCache.merge([]).trim(3) == 0


def test_a_layer_with_a_window_of_its_own_gets_each_text_s_narrower_mask() -> None:
    caches = [filled(tokens) for tokens in (5, 23, 60)]
    for tokens in (1, 4):
        mask = SlidingWindowKVCache.merge(caches).make_mask(tokens, window_size=6)
        for row, cache in zip(mask, caches, strict=True):
            own = cache.make_mask(tokens, return_array=True, window_size=6)
            assert mx.array_equal(row[0, :, : own.shape[1]], own)
            assert not mx.any(row[0, :, own.shape[1] :])


def test_what_cannot_be_in_one_batch_is_refused() -> None:
    with pytest.raises(WindowError, match="window=25 and 24"):
        SlidingWindowKVCache.merge([filled(5), filled(5, 25)])
    batch = SlidingWindowKVCache.merge([filled(5)])
    with pytest.raises(WindowError, match="kv_bits=8 and None"):
        batch.extend(SlidingWindowKVCache.merge([SlidingWindowKVCache(WINDOW, SINKS, kv_bits=8)]))
    assert batch.offset.tolist() == [5]
    near, far_on = (kind(ROPES["plain"], WINDOW, SINKS, None, trained) for trained in (48, 60))
    with pytest.raises(WindowError, match=r"positions=.*trained=60.* and .*trained=48"):
        SlidingWindowKVCache.merge([near, far_on])
    two = SlidingWindowKVCache(WINDOW, SINKS)
    two.update_and_fetch(mx.ones((2, 2, 1, WIDTH)), mx.ones((2, 2, 1, WIDTH)))
    with pytest.raises(WindowError, match="2 texts"):
        SlidingWindowKVCache.merge([two])
    dynamic = kind(DynamicNTKScalingRoPE(WIDTH, 48, False, 1000.0, 2.0), WINDOW, SINKS, None, 48)
    with pytest.raises(UnsupportedModelError, match="dynamic NTK"):
        SlidingWindowKVCache.merge([dynamic])


def test_padding_that_cannot_be_taken_is_refused() -> None:
    batch = SlidingWindowKVCache.merge([filled(5), filled(60)])
    with pytest.raises(WindowError, match="left_padding"):
        batch.prepare(left_padding=[0, 3])
    with pytest.raises(WindowError, match="one for each of the 2 texts"):
        batch.prepare(lengths=[1], right_padding=[3])
    batch.prepare(lengths=[1, 4], right_padding=[3, 0])
    with pytest.raises(WindowError, match="finalize"):
        batch.extend(SlidingWindowKVCache.merge([filled(5)]))
    rows = mx.ones((2, 2, 4, WIDTH))
    batch.update_and_fetch(rows, rows)
    with pytest.raises(WindowError, match="finalize"):
        batch.update_and_fetch(rows, rows)
    batch.finalize()
    assert batch.offset.tolist() == [6, 64]
