"""Which contexts and expert budgets are measured, in what order, and when to stop. Knows no model and no engine.

More slots are not always faster: what they take, the page cache lacks, and misses wait for the disk. So budgets are
tried from the largest that fits downwards, the largest of each context first, then between the fastest and its
neighbours, and what is nearly the fastest is measured again while there is time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mlxmoe.memory.plan import Plan

SHARES = (1.0, 0.75, 0.5, 0.35)  # of what fits beside a context
CLOSE = 0.9  # of the fastest: measured again, as chance may have decided
MOST_REPEATS = 3  # of one configuration


@dataclass(frozen=True, slots=True)
class Decoded:
    """What decoding showed. `steps_s`: seconds of each token. `hits`, `misses`: experts asked for.

    `read_bytes`: of experts, for misses and for guesses of the next layer's, from wherever they lay; `disk_bytes`: of
    these what came from the disk, None where the system does not tell. `pressure`: why it was stopped, if memory was
    short. `overrun`: why it was left out, if there was no time for it.
    """

    steps_s: tuple[float, ...] = ()
    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    disk_bytes: int | None = None
    pressure: str | None = None
    overrun: str | None = None

    def __add__(self, other: Decoded) -> Decoded:
        return Decoded(
            self.steps_s + other.steps_s,
            self.hits + other.hits,
            self.misses + other.misses,
            self.read_bytes + other.read_bytes,
            None if self.disk_bytes is None or other.disk_bytes is None else self.disk_bytes + other.disk_bytes,
            self.pressure or other.pressure,
        )

    @property
    def tokens(self) -> int:
        return len(self.steps_s)

    @property
    def step_s(self) -> float:
        """Seconds of a token, on average of all but the fastest and slowest tenth: what other programs do now and
        then is no part of it, while misses that come every few tokens are."""
        cut = self.tokens // 10
        middle = sorted(self.steps_s)[cut : self.tokens - cut]
        return sum(middle) / len(middle) if middle else 0.0

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.step_s if self.step_s > 0 else 0.0

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0


@dataclass(frozen=True, slots=True)
class Point:
    """A configuration: the memory divided for a context, with some bytes of expert slots."""

    context: int
    plan: Plan


class Bench(Protocol):
    """Where a configuration is measured."""

    def decode(self, point: Point, seconds: float) -> Decoded:
        """Decode with the context full, for about `seconds`: a token at least, or `overrun` says why there is no
        time for that. Raises KeyboardInterrupt."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A configuration and all that was seen of it. `repeats`: how often it was measured."""

    point: Point
    decoded: Decoded
    repeats: int = 1

    @property
    def usable(self) -> bool:
        return self.decoded.pressure is None and self.decoded.tokens > 0


class Search:
    """Measures until all is known or the time is up; `rows` is what was measured, also after an interrupt.

    `most`: for each context, ascending, the plan with the most slots that fit. `with_budget(plan, bytes)`: the plan
    with other slots. `floor_bytes`: the fewest. `tell(point)`: told what is measured next.
    """

    def __init__(
        self,
        most: Sequence[Point],
        with_budget: Callable[[Plan, int], Plan],
        floor_bytes: int,
        bench: Bench,
        *,
        clock: Callable[[], float],
        deadline: float,
        tell: Callable[[Point], None] = lambda point: None,
    ) -> None:
        self.rows: list[Measured] = []
        self._most = most
        self._with_budget = with_budget
        self._floor_bytes = floor_bytes
        self._bench = bench
        self._clock = clock
        self._deadline = deadline
        self._tell = tell
        self._left = len(SHARES) + 4 * (len(most) - 1) + 4

    def run(self) -> bool:
        """Measure; False where there was no time for all of it: what was left out has a row that says so.

        Raises KeyboardInterrupt.
        """
        complete = True
        for point in self._points():
            left = self._deadline - self._clock()
            if left > 0:
                self._tell(point)
                decoded = self._bench.decode(point, left / max(2, self._left))
            else:
                decoded = Decoded(overrun="no time was left")
            self._left -= 1
            complete = complete and decoded.overrun is None
            self._note(point, decoded)
        return complete

    def fastest(self, context: int) -> Measured | None:
        """Of those measured with `context`."""
        rows = [row for row in self.rows if row.point.context == context and row.usable]
        return max(rows, key=lambda row: row.decoded.tokens_per_s, default=None)

    def _points(self) -> Iterator[Point]:
        """What to measure next, by what was measured so far."""
        first, *others = self._most
        for most in self._most:  # whenever it ends, as many contexts as possible can be compared
            yield from self._new(most, most.plan.bank_bytes)
        for share in SHARES:
            yield from self._new(first, int(first.plan.bank_bytes * share))
        for most in others:
            best = self.fastest(first.context)
            if best is not None and best.point.plan.bank_bytes < most.plan.bank_bytes:
                yield from self._new(most, best.point.plan.bank_bytes)
            elif best is not None:
                yield from self._new(most, most.plan.bank_bytes * 3 // 4)
        yield from self._around(first)
        for _ in range(MOST_REPEATS - 1):
            for most in self._most:
                yield from self._again(most.context)

    def _new(self, most: Point, bank_bytes: int) -> Iterator[Point]:
        """A configuration unless it is known, or more of the memory than one that brought pressure, or of a context
        that there is no time for."""
        plan = most.plan
        if plan.expert_bytes and bank_bytes < plan.bank_bytes:
            plan = self._with_budget(plan, max(self._floor_bytes, bank_bytes))
        known = any(row.point.context == most.context and row.point.plan.slots == plan.slots for row in self.rows)
        too_much = any(row.decoded.pressure and row.point.plan.total_bytes <= plan.total_bytes for row in self.rows)
        same = [row.decoded.overrun for row in self.rows if row.point.context == most.context]
        too_long = bool(same) and all(same)
        if not known and not too_much and not too_long:
            yield Point(most.context, plan)

    def _around(self, most: Point) -> Iterator[Point]:
        """Between the fastest and its neighbours in bytes; of the smallest, the one below is what a token needs."""
        best = self.fastest(most.context)
        if best is None or not most.plan.expert_bytes:
            return
        at = best.point.plan.bank_bytes
        same = [row for row in self.rows if row.point.context == most.context and row.usable]
        budgets = sorted(row.point.plan.bank_bytes for row in same)
        below, above = [b for b in budgets if b < at], [b for b in budgets if b > at]
        for neighbour in (*above[:1], *(below[-1:] or [self._floor_bytes])):
            yield from self._new(most, (at + neighbour) // 2)

    def _again(self, context: int) -> Iterator[Point]:
        """The two fastest of a context, and others that come close; not where there is no choice."""
        same = [row for row in self.rows if row.point.context == context and row.usable]
        same.sort(key=lambda row: -row.decoded.tokens_per_s)
        for place, row in enumerate(same if len(same) > 1 else []):
            if place < 2 or row.decoded.tokens_per_s >= CLOSE * same[0].decoded.tokens_per_s:
                yield row.point

    def _note(self, point: Point, decoded: Decoded) -> None:
        for number, row in enumerate(self.rows):
            if row.point is point:
                if decoded.overrun is not None:  # what was seen of it before holds
                    return
                self.rows[number] = replace(row, decoded=row.decoded + decoded, repeats=row.repeats + 1)
                return
        self.rows.append(Measured(point, decoded))
