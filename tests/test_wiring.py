"""Wired memory: never touched unless asked for, bounded by the working set, and put back."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxmoe import load
from mlxmoe.memory.wiring import Wiring


class Limit:
    """Stands in for MLX's one wired limit."""

    def __init__(self) -> None:
        self.now = 7
        self.seen: list[int] = []

    def set(self, nbytes: int) -> int:
        before, self.now = self.now, nbytes
        self.seen.append(nbytes)
        return before


def test_the_limit_is_the_budget_within_the_working_set_and_is_put_back() -> None:
    limit = Limit()
    wiring = Wiring(2**62, 20 * 2**30, limit.set)
    assert limit.now == 20 * 2**30
    wiring.undo()
    wiring.undo()
    assert limit.seen == [20 * 2**30, 7]
    Wiring(2**30, 20 * 2**30, limit.set)
    assert limit.now == 2**30


def test_without_a_gpu_nothing_is_wired_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    limit = Limit()
    Wiring(2**30, None, limit.set).undo()
    assert limit.seen == []
    assert "no effect" in caplog.text


def test_wired_memory_is_never_touched_unless_asked_for(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(mx, "set_wired_limit", lambda nbytes: seen.append(nbytes) or 0)
    monkeypatch.setattr("mlxmoe.engine.working_set_bytes", lambda: 2**34)
    monkeypatch.setattr(Wiring.__init__, "__defaults__", (mx.set_wired_limit,))
    with load(tiny, memory="1GB") as engine:
        assert len(list(engine.stream([1, 2, 3], max_tokens=3))) == 3
    assert seen == []
    with load(tiny, memory="1GB", wired=True) as engine:
        assert seen == [10**9]
        assert len(list(engine.stream([1, 2, 3], max_tokens=3))) == 3
    assert seen == [10**9, 0]
