"""Who gives way, and how a chunk is cut into waves: rules that hold for every input."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.experts.policy import LRFU, plan_waves

HALF_LIFE = 32  # tokens

experts = st.integers(0, 15)
wanted = st.lists(experts, min_size=1, max_size=200)


def last_use_of(sequence: list[int]) -> dict[int, int]:
    return {expert: position for position, expert in enumerate(sequence)}


def call(policy: LRFU, wanted: list[int]) -> None:
    """One token wants these experts, and there is a slot for each."""
    policy.count(wanted, len(wanted))
    policy.touch(wanted)


def values(tokens: Sequence[Sequence[int]]) -> dict[int, float]:
    """What each expert is worth after `tokens`, from the definition."""
    worth = dict.fromkeys(range(16), 0.0)
    for number, wanted in enumerate(tokens, 1):
        half_life = min(HALF_LIFE, max(1.0, number / 12))
        worth = {expert: old * 2 ** (-1 / half_life) + wanted.count(expert) for expert, old in worth.items()}
    return worth


@given(
    calls=st.lists(st.lists(experts, min_size=1, max_size=4), max_size=60),
    looks=st.sets(st.integers(0, 60)),
    top_k=st.integers(1, 4),
)
def test_hits_that_are_noted_count_as_those_that_are_counted_at_once(
    calls: list[list[int]], looks: set[int], top_k: int
) -> None:
    noting, counting = LRFU(), LRFU()
    for policy in (noting, counting):
        policy.admit(range(16))
    for number, wanted in enumerate(calls):
        held = [expert for expert in wanted if expert in noting] or list(noting)[:1]
        noting.hit(held, top_k)
        counting.count(held, top_k)
        counting.touch(held)
        if number in looks and len(noting) > 2:
            assert noting.evict(1, keep=()) == counting.evict(1, keep=())
        assert len(noting._noted) < 16, "they do not pile up"
    assert noting.last_calls == counting.last_calls
    assert list(noting) == list(counting)
    assert noting.ages == counting.ages


def test_the_least_used_goes_first_and_what_must_stay_stays() -> None:
    policy = LRFU()
    for wanted in ([1, 2], [1, 3], [1, 2]):
        call(policy, wanted)
    assert list(policy) == [3, 2, 1]
    assert policy.last_calls == {3: 2, 2: 3, 1: 3}
    assert list(policy.evict(1, keep=[3])) == [2]
    assert list(policy) == [3, 1]
    assert list(policy.evict(2, keep=())) == [3, 1]


def test_often_used_long_ago_is_worth_less_than_once_just_now() -> None:
    policy = LRFU()
    for _ in range(200):
        call(policy, [0])
    for _ in range(8 * HALF_LIFE):
        call(policy, [1])
    call(policy, [2])
    assert list(policy.evict(1, keep=())) == [0]


def test_what_an_expert_is_worth_outlives_its_slot() -> None:
    policy = LRFU()
    for wanted in ([0], [0], [1]):
        call(policy, wanted)
    policy.clear()
    assert list(policy) == []
    policy.touch([1, 0])
    assert list(policy) == [0, 1], "as they were, whatever came back first"


@given(
    tokens=st.lists(st.lists(experts, min_size=2, max_size=2, unique=True), min_size=1, max_size=60), data=st.data()
)
def test_order_is_that_of_the_definition_whatever_was_evicted(tokens: list[list[int]], data: st.DataObject) -> None:
    policy = LRFU()
    for number, wanted in enumerate(tokens, 1):
        call(policy, wanted)
        worth = values(tokens[:number])
        order = [worth[expert] for expert in policy]
        assert order == pytest.approx(sorted(order)), "the first is worth least"
        others = sorted(worth[expert] for expert in policy if expert not in wanted)
        count = data.draw(st.integers(0, len(others)))
        victims = policy.evict(count, keep=wanted)
        assert [worth[expert] for expert in victims] == pytest.approx(others[:count])
        assert set(wanted) <= set(policy)
        assert not set(victims) & set(policy)


@given(tokens=st.lists(st.tuples(experts, experts), min_size=1, max_size=60), cut=st.integers(1, 60))
def test_a_chunk_counts_as_its_tokens_do_one_by_one(tokens: list[tuple[int, int]], cut: int) -> None:
    in_chunks, one_by_one = LRFU(), LRFU()
    for start in range(0, len(tokens), cut):
        in_chunks.count([expert for pair in tokens[start : start + cut] for expert in pair], top_k=2)
    for pair in tokens:
        one_by_one.count(pair, top_k=2)
    for policy in (in_chunks, one_by_one):
        policy.touch(range(16))
    assert list(in_chunks) == list(one_by_one)


def test_an_endless_stream_neither_overflows_nor_changes_the_order() -> None:
    policy, tokens = LRFU(), 600 * HALF_LIFE  # a token's weight doubles with each half life
    rng = random.Random(0)
    for _ in range(tokens):
        policy.count(rng.sample(range(12), 2), top_k=2)
    last = [rng.sample(range(16), 2) for _ in range(20 * HALF_LIFE)]
    policy.touch(range(8))
    for pair in last:
        policy.count(pair, top_k=2)
    policy.touch(range(16))
    decay = 2 ** (-1 / HALF_LIFE)
    worth = [sum(decay**age for age, pair in enumerate(reversed(last)) if expert in pair) for expert in range(16)]
    assert list(policy) == sorted(range(16), key=worth.__getitem__)
    assert list(policy.evict(16, keep=())) == sorted(range(16), key=worth.__getitem__)


present = st.sets(experts)
coming = st.sets(experts)


def waves_of(sequence: list[int], present: set[int], coming: set[int], capacity: int) -> list[list[int]]:
    present = set(sorted(present)[:capacity])
    return plan_waves(last_use_of(sequence), present, coming - present, capacity)


@given(sequence=wanted, present=present, coming=coming, capacity=st.integers(1, 16))
def test_waves_hold_each_wanted_expert_once(
    sequence: list[int], present: set[int], coming: set[int], capacity: int
) -> None:
    waves = waves_of(sequence, present, coming, capacity)
    assert sorted(e for wave in waves for e in wave) == sorted(set(sequence))
    assert all(waves)


@given(sequence=wanted, present=present, coming=coming, capacity=st.integers(1, 16))
def test_hits_come_first_and_a_wave_to_be_read_leaves_room_for_the_next(
    sequence: list[int], present: set[int], coming: set[int], capacity: int
) -> None:
    present = set(sorted(present)[:capacity])
    waves = waves_of(sequence, present, coming, capacity)
    hits = [set(wave) <= present for wave in waves]
    assert hits == sorted(hits, reverse=True)
    assert all(len(wave) <= max(1, capacity // 4) for wave, hit in zip(waves, hits, strict=True) if not hit)
    if len(waves) > 1 and len(set(sequence)) > capacity > 1:
        assert len(waves[0]) < capacity, "something can be read while the first one computes"


@given(sequence=wanted, capacity=st.integers(1, 16))
def test_what_is_all_there_goes_in_one_wave(sequence: list[int], capacity: int) -> None:
    assert len(plan_waves(last_use_of(sequence), set(sequence), set(), capacity)) == 1


@given(sequence=wanted, coming=coming, capacity=st.integers(1, 16))
def test_who_is_coming_is_first_and_the_others_by_their_last_use(
    sequence: list[int], coming: set[int], capacity: int
) -> None:
    last_use = last_use_of(sequence)
    order = [e for wave in plan_waves(last_use, set(), coming, capacity) for e in wave]
    assert order == sorted(order, key=lambda e: (e not in coming, last_use[e]))


def test_who_was_admitted_and_not_used_is_as_old_as_can_be() -> None:
    policy = LRFU()
    policy.count([1, 2], top_k=2)
    policy.touch([1, 2])
    policy.admit([3])
    assert policy.last_calls == {3: 0, 1: 1, 2: 1}
    assert list(policy.evict(9, keep=[2])) == [3, 1], "fewer than nine are all"
    assert list(policy) == [2]
