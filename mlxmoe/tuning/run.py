"""What a tuning measures of one loaded engine, within its time. Knows nothing of what is best, and keeps nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

from mlxmoe.doctor.machine import Machine
from mlxmoe.engine import Engine
from mlxmoe.errors import MemoryPressureError
from mlxmoe.memory.guard import MemoryEvent
from mlxmoe.memory.plan import CHUNK_TOKENS, replan
from mlxmoe.memory.sizes import format_bytes
from mlxmoe.opening import OpenedModel
from mlxmoe.tuning.bench import EngineBench
from mlxmoe.tuning.search import Point, Search
from mlxmoe.tuning.tuned_report import PrefillRow

PREFILL_SHARE = 0.1  # of the time that is left: what a chunk may be expected to take

# (seconds gone, seconds in all, what is measured now)
TuneProgress = Callable[[float, float, str], None]


class Run:
    """The measurements on one loaded engine, as many as `budget_s` seconds are enough for.

    `ended`: how they did; `seconds`: what they took, with the `gone_s` of the budget that were gone before. `sync_s`:
    of a host sync. `read_bytes_per_s`: of the model's files, None where that is not known.
    """

    def __init__(
        self,
        engine: Engine,
        opened: OpenedModel,
        points: Sequence[Point],
        events: Sequence[MemoryEvent],
        budget_s: float,
        progress: TuneProgress | None,
        read_bytes_per_s: float | None = None,
        gone_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.prefill: list[PrefillRow] = []
        self.sync_s = 0.0
        self.ended: Literal["complete", "time", "interrupted"] = "complete"
        self._clock = clock
        self._start = clock() - gone_s
        self._budget_s = budget_s
        self._progress = progress
        deadline = self._start + budget_s
        self._bench = EngineBench(engine, events, Machine().bytes_from_disk, clock, deadline, read_bytes_per_s)
        self._most = engine.plan.chunk_tokens
        self._context = engine.plan.context or self._most + 1
        layers = opened.layers
        self.search = Search(
            points,
            lambda plan, nbytes: replan(plan, layers, nbytes),
            sum(layer.floor_bytes for layer in layers),
            self._bench,
            clock=clock,
            deadline=deadline,
            tell=self._tell_point,
        )

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    def measure(self) -> None:
        """All that there is time for. Raises KeyboardInterrupt where that came before anything was measured."""
        try:
            self.sync_s = self._bench.sync()
            with suppress(MemoryPressureError):  # then decode is still to be tried, with fewer slots
                self._measure_prefill()
            self.ended = "complete" if self.search.run() else "time"
        except KeyboardInterrupt:
            if not any(row.usable for row in self.search.rows):
                raise
            self.ended = "interrupted"

    def _measure_prefill(self) -> None:
        """Chunks of the sizes that a plan chooses from, the small ones first: they tell what a larger one takes."""
        self._tell("the first words")
        each_s = self._bench.seed()
        sizes = {min(tokens, self._most, self._context - 1) for tokens in CHUNK_TOKENS}
        for tokens in sorted(size for size in sizes if size > 0):
            if each_s * tokens > PREFILL_SHARE * (self._budget_s - self.seconds):
                return
            self._tell(f"a prompt of {tokens} tokens")
            seconds = self._bench.prefill(tokens)
            each_s = min(each_s, seconds / tokens)
            self.prefill.append(PrefillRow(tokens, tokens / seconds))

    def _tell_point(self, point: Point) -> None:
        experts = f", {format_bytes(point.plan.bank_bytes)} of experts" if point.plan.expert_bytes else ""
        self._tell(f"context {point.context}{experts}")

    def _tell(self, what: str) -> None:
        if self._progress is not None:
            self._progress(min(self.seconds, self._budget_s), self._budget_s, what)
