"""MLX's process-wide limits: the pool's is held and put back, wired memory is never touched unless asked for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxmoe import load
from mlxmoe.memory.limits import SharedLimit, hold_wired

GIB = 2**30


class Limit:
    """Stands in for MLX's one wired limit."""

    def __init__(self) -> None:
        self.seen = [7]

    def set(self, nbytes: int) -> int:
        self.seen.append(nbytes)
        return self.seen[-2]


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What MLX's wired limit is set to, the first being what it was."""
    limit = Limit()
    monkeypatch.setattr(mx, "set_wired_limit", limit.set)
    return limit.seen


class Holder:
    """Something that lives as long as it holds a limit."""


def test_the_wired_limit_is_the_budget_within_the_working_set_and_is_put_back(wired: list[int]) -> None:
    holder = Holder()
    let_go = hold_wired(2**62, 20 * GIB, holder)
    assert wired == [7, 20 * GIB]
    let_go()
    let_go()
    assert wired == [7, 20 * GIB, 7]
    let_go = hold_wired(GIB, 20 * GIB, holder)
    assert wired[-1] == GIB
    del holder
    gc.collect()
    assert wired[-1] == 7, "whoever is forgotten holds nothing"


@pytest.mark.parametrize("first", [0, 1])
def test_of_several_holders_the_last_one_has_its_way(first: int) -> None:
    limit, holders = Limit(), [Holder(), Holder()]
    shared = SharedLimit(limit.set)
    let_go = [shared.hold(100 + number, holder) for number, holder in enumerate(holders)]
    assert limit.seen[-1] == 101
    let_go[first]()
    assert limit.seen[-1] == (101 if first == 0 else 100)
    let_go[1 - first]()
    assert limit.seen[-1] == 7


def test_without_a_gpu_nothing_is_wired_and_it_is_said(wired: list[int], caplog: pytest.LogCaptureFixture) -> None:
    hold_wired(GIB, None, Holder())()
    assert wired == [7]
    assert "no effect" in caplog.text


def test_wired_memory_is_never_touched_unless_asked_for(
    tiny: Path, wired: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxmoe.engine.working_set_bytes", lambda: 16 * GIB)
    with load(tiny, memory="1GB") as engine:
        assert len(list(engine.stream([1, 2, 3], max_tokens=3))) == 3
    assert wired == [7]
    with load(tiny, memory="1GB", wired=True) as engine:
        assert wired == [7, 10**9]
        assert len(list(engine.stream([1, 2, 3], max_tokens=3))) == 3
    assert wired == [7, 10**9, 7]


def test_the_pool_is_bounded_while_an_engine_lives(tiny: Path) -> None:
    default = mx.set_cache_limit(2**40)
    try:
        with load(tiny, context=512) as engine:
            assert engine.plan.pool_bytes >= 64 * 2**20
            most = 0
            for _ in engine.stream(list(range(1, 400)), max_tokens=5):
                most = max(most, mx.get_cache_memory())
            assert 0 < most <= engine.plan.pool_bytes
            assert mx.set_cache_limit(engine.plan.pool_bytes) == engine.plan.pool_bytes
        assert mx.set_cache_limit(default) == 2**40
    finally:
        mx.set_cache_limit(default)
