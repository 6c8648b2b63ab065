"""Which configurations are measured, which is recommended, and the constants that come out: no model, no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mlxmoe.memory.experts import MoeLayer
from mlxmoe.memory.plan import KVBytes, Plan, make_plan, replan
from mlxmoe.tuning.fit import TimedStep, fit_rates
from mlxmoe.tuning.roofline import Rates, Step, decode_s
from mlxmoe.tuning.search import Decoded, Point, Search
from mlxmoe.tuning.tuned_report import NOISE, TuneRow, choose, explain, is_most, pareto

LAYERS = [MoeLayer(f"layer.{n}", 64, 4, 10**6) for n in range(10)]
FLOOR = sum(layer.floor_bytes for layer in LAYERS)
MEMORY = 900 * 10**6


def plan_of(context: int) -> Plan:
    return make_plan(
        LAYERS, trunk_bytes=10**7, kv=KVBytes(step_bytes=256 * 10**4), prefill=lambda chunk, context: 10**6,
        context=context, model_context=65536, experts="auto", memory_bytes=MEMORY,
    )  # fmt: skip


class FakeBench:
    """A machine whose speed is a function of context and bytes of slots; each measurement takes what it is given."""

    def __init__(self, speed: Callable[[int, int], float], cost_s: float | None = None) -> None:
        self.speed, self.cost_s = speed, cost_s
        self.now = 0.0
        self.asked: list[tuple[int, int]] = []
        self.interrupt_at = self.pressure_above = self.overrun_above = self.no_time_after = 10**18

    def decode(self, point: Point, seconds: float) -> Decoded:
        bank = point.plan.bank_bytes
        if len(self.asked) >= self.interrupt_at:
            raise KeyboardInterrupt
        self.asked.append((point.context, bank))
        self.now += seconds if self.cost_s is None else self.cost_s
        if point.context > self.overrun_above or len(self.asked) > self.no_time_after:
            return Decoded(overrun="would take too long")
        if point.plan.total_bytes > self.pressure_above:
            return Decoded(pressure="short of memory")
        return Decoded((1 / self.speed(point.context, bank),) * 10, 5, 5, 5 * 10**6, 0)


def search(bench: FakeBench, contexts: tuple[int, ...] = (4096, 16384), budget_s: float = 100.0) -> Search:
    return Search(
        [Point(context, plan_of(context)) for context in contexts],
        lambda plan, nbytes: replan(plan, LAYERS, nbytes),
        FLOOR,
        bench,
        clock=lambda: bench.now,
        deadline=budget_s,
    )


def peak_at(best: int) -> Callable[[int, int], float]:
    return lambda context, bank: 20 - abs(bank - best) / 10**8 - context / 4096


def rows_of(found: Search) -> list[TuneRow]:
    return [
        TuneRow(
            row.point.context, row.point.plan, row.point.plan.bank_bytes / row.point.plan.expert_bytes,
            row.decoded.tokens_per_s, row.decoded.tokens, row.decoded.hit_rate, None, None, row.decoded.pressure,
        )
        for row in found.rows
    ]  # fmt: skip


@pytest.mark.parametrize("best", [100 * 10**6, 300 * 10**6, 480 * 10**6, 640 * 10**6])
def test_the_peak_is_found_wherever_it_is_and_nothing_measured_beats_it(best: int) -> None:
    found = search(FakeBench(peak_at(best), cost_s=1.0))
    assert found.run()
    rows = rows_of(found)
    chosen = choose(rows, "speed", None)
    assert chosen is not None
    assert abs(chosen.plan.bank_bytes - best) <= 0.2 * 640 * 10**6
    assert all(row.full_tokens_per_s <= chosen.full_tokens_per_s / (1 - NOISE) ** 2 for row in rows)


def test_every_configuration_stays_within_the_memory_and_above_one_tokens_experts() -> None:
    bench = FakeBench(peak_at(0))
    found = search(bench, (4096, 16384, 32768))
    found.run()
    assert all(row.point.plan.total_bytes <= MEMORY for row in found.rows)
    assert all(row.point.plan.bank_bytes >= FLOOR for row in found.rows)
    assert {row.point.context for row in found.rows} == {4096, 16384, 32768}


def test_what_is_nearly_the_fastest_is_measured_again() -> None:
    found = search(FakeBench(lambda context, bank: 10.0, cost_s=1.0))
    found.run()
    assert {row.repeats for row in found.rows} == {3}
    assert {row.decoded.tokens for row in found.rows} == {30}


def test_what_there_is_no_time_left_for_is_not_asked_and_has_a_row_that_says_so() -> None:
    bench = FakeBench(peak_at(10**8), cost_s=30.0)
    found = search(bench, budget_s=70.0)
    assert not found.run()
    assert len(bench.asked) == 3
    left = [row for row in found.rows if row.decoded.overrun is not None]
    assert len(found.rows) == 3 + len(left)
    assert {row.decoded.overrun for row in left} == {"no time was left"}


def test_a_context_that_there_is_no_time_for_is_tried_once_and_the_others_go_on() -> None:
    bench = FakeBench(peak_at(10**8), cost_s=1.0)
    bench.overrun_above = 4096
    found = search(bench, (4096, 16384, 32768))
    assert not found.run()
    assert [context for context, _ in bench.asked if context > 4096] == [16384, 32768]
    assert sum(context == 4096 for context, _ in bench.asked) > 4


def test_no_time_to_measure_again_leaves_what_was_seen() -> None:
    bench = FakeBench(peak_at(10**8), cost_s=1.0)
    bench.no_time_after = 9
    found = search(bench)
    assert not found.run()
    assert len(bench.asked) > 9
    measured = [row for row in found.rows if row.usable]
    assert sum(row.repeats for row in measured) == 9
    assert all(row.decoded.overrun is None for row in measured)


def test_an_interrupt_leaves_what_was_measured() -> None:
    bench = FakeBench(peak_at(10**8))
    bench.interrupt_at = 3
    found = search(bench)
    with pytest.raises(KeyboardInterrupt):
        found.run()
    assert len(found.rows) == 3
    assert choose(rows_of(found), "balanced", None) is not None


def test_what_brings_pressure_is_no_choice_and_nothing_larger_is_tried() -> None:
    bench = FakeBench(lambda context, bank: float(bank))
    bench.pressure_above = plan_of(4096).total_bytes - 10**8
    found = search(bench)
    found.run()
    totals = [row.point.plan.total_bytes for row in found.rows]
    assert found.rows[0].decoded.pressure
    for number, row in enumerate(found.rows):
        assert not row.decoded.pressure or all(total < totals[number] for total in totals[number + 1 :])
    rows = rows_of(found)
    chosen = choose(rows, "speed", None)
    assert chosen is not None
    assert chosen.usable
    assert any("was stopped: short of memory" in reason for reason in explain(rows, chosen, None))


def row(context: int, bank: int, speed: float) -> TuneRow:
    plan = replan(plan_of(context), LAYERS, bank)
    return TuneRow(context, plan, plan.bank_bytes / plan.expert_bytes, speed, 10, 0.9, None, None, None)


ROWS = [
    row(4096, 600 * 10**6, 20.0), row(4096, 300 * 10**6, 18.0),
    row(16384, 500 * 10**6, 16.0), row(16384, 300 * 10**6, 17.0),
    row(32768, 300 * 10**6, 9.0), row(65536, 100 * 10**6, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("goal", "least", "context", "speed"),
    [
        ("speed", None, 4096, 20.0),
        ("balanced", None, 16384, 17.0),
        ("context", None, 32768, 9.0),
        ("context", 0.5, 65536, 1.0),
        ("context", 10.0, 16384, 17.0),
        ("speed", 10.0, 4096, 20.0),
    ],
)
def test_goals(goal: str, least: float | None, context: int, speed: float) -> None:
    chosen = choose(ROWS, goal, least)  # type: ignore[arg-type]
    assert chosen is not None
    assert (chosen.context, chosen.full_tokens_per_s) == (context, speed)


def test_a_speed_out_of_reach_recommends_nothing_and_says_the_fastest() -> None:
    assert choose(ROWS, "context", 50.0) is None
    (said,) = explain(ROWS, None, 50.0)
    assert "No configuration keeps 50.0 tokens/s" in said
    assert "20.00" in said
    assert choose([], "speed", None) is None


def test_least_speed_is_not_reached_by_rounding() -> None:
    assert choose([row(4096, FLOOR, 9.9999)], "context", 10.0) is None


def test_more_slots_are_taken_where_they_cost_nothing_and_named_only_where_they_do() -> None:
    equal = [row(4096, 300 * 10**6, 20.3), row(4096, 600 * 10**6, 20.0)]
    chosen = choose(equal, "speed", None)
    assert chosen is equal[1]
    assert is_most(chosen, equal)
    starved = [row(4096, 300 * 10**6, 20.0), row(4096, 600 * 10**6, 8.0)]
    chosen = choose(starved, "speed", None)
    assert chosen is starved[0]
    assert not is_most(chosen, starved)
    assert any("More slots are slower here" in reason for reason in explain(starved, chosen, None))


def test_the_front_holds_what_nothing_else_surpasses() -> None:
    assert [(r.context, r.full_tokens_per_s) for r in pareto(ROWS)] == [
        (4096, 20.0), (16384, 17.0), (32768, 9.0), (65536, 1.0)
    ]  # fmt: skip
    assert pareto([*ROWS, row(65536, 110 * 10**6, 30.0)]) == [row(65536, 110 * 10**6, 30.0)]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_constants_are_found_again_from_steps_that_they_made(noise: float) -> None:
    truth = Rates(
        5e10, read_bytes_per_s=2e9, efficiency=1.0, layer_s=0.0, sync_s=3e-4, miss_s=1e-3, kv_bytes_per_s=2e10
    )
    steps = []
    for number, (kv, misses, syncs) in enumerate(
        [(1e8, 0, 0), (1e9, 0, 0), (1e8, 20, 48), (1e8, 80, 48), (1e9, 40, 48), (4e9, 10, 48), (1e8, 40, 48)]
    ):
        disk = 2e6 * misses * (number % 3) / 2
        step = Step(2e9 + kv, 48, disk, misses, syncs, kv)
        steps.append(TimedStep(step, decode_s(step, truth) * (1 + noise * (-1) ** number)))
    found = fit_rates(steps)
    for timed in steps:
        assert decode_s(timed.step, found) == pytest.approx(timed.seconds, rel=1e-6 + 2 * noise)
    if not noise:
        assert found.bandwidth_bytes_per_s == pytest.approx(5e10)
        assert found.sync_s == pytest.approx(3e-4)
        assert found.read_bytes_per_s == pytest.approx(2e9)


def test_no_constant_is_negative_and_one_row_is_enough() -> None:
    step = Step(2e9, 48, 0.0, 0.0, 0, 1e8)
    faster_when_longer = [TimedStep(step, 0.1), TimedStep(replace(step, resident_bytes=3e9, kv_bytes=1.1e9), 0.05)]
    for steps in (faster_when_longer, faster_when_longer[:1]):
        found = fit_rates(steps)
        assert min(found.bandwidth_bytes_per_s, found.kv_bytes_per_s or 1, found.read_bytes_per_s) > 0
        assert found.sync_s >= 0
        assert found.miss_s >= 0


def test_a_hiccup_is_no_part_of_a_rate_but_regular_misses_are() -> None:
    assert Decoded((0.1,) * 19 + (5.0,)).tokens_per_s == pytest.approx(10)
    assert Decoded((0.1, 0.3) * 10).tokens_per_s == pytest.approx(5)
    assert Decoded().tokens_per_s == 0
