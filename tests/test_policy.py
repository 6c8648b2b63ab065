"""Who gives way, and how a chunk is cut into waves: rules that hold for every input."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.experts.policy import LRU, plan_waves

experts = st.integers(0, 15)
wanted = st.lists(experts, min_size=1, max_size=200)


def last_use_of(sequence: list[int]) -> dict[int, int]:
    return {expert: position for position, expert in enumerate(sequence)}


def test_lru_evicts_the_least_recent_and_keeps_what_it_must() -> None:
    lru = LRU()
    lru.touch([1, 2, 3])
    lru.touch([1])
    assert lru.evict(1, keep=()) == [2]
    assert lru.evict(1, keep=[3]) == [1]
    assert list(lru) == [3]


@given(sequence=wanted, resident=st.sets(experts), capacity=st.integers(1, 16))
def test_waves_hold_each_wanted_expert_once_and_fit(sequence: list[int], resident: set[int], capacity: int) -> None:
    resident = set(sorted(resident)[:capacity])
    waves = plan_waves(last_use_of(sequence), resident, capacity)
    assert sorted(e for wave in waves for e in wave) == sorted(set(sequence))
    assert all(1 <= len(wave) <= capacity for wave in waves)


@given(sequence=wanted, resident=st.sets(experts), capacity=st.integers(1, 16))
def test_no_hit_is_evicted_before_it_was_used(sequence: list[int], resident: set[int], capacity: int) -> None:
    resident = set(sorted(resident)[:capacity])
    waves = plan_waves(last_use_of(sequence), resident, capacity)
    assert resident & set(sequence) <= set(waves[0])


@given(sequence=wanted, capacity=st.integers(1, 16))
def test_what_fits_goes_in_one_wave(sequence: list[int], capacity: int) -> None:
    if len(set(sequence)) <= capacity:
        assert len(plan_waves(last_use_of(sequence), set(), capacity)) == 1


@given(sequence=wanted, capacity=st.integers(1, 16))
def test_later_waves_are_wanted_later(sequence: list[int], capacity: int) -> None:
    last_use = last_use_of(sequence)
    order = [e for wave in plan_waves(last_use, set(), capacity) for e in wave]
    assert order == sorted(order, key=last_use.__getitem__)
