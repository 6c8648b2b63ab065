"""mlxmoe tune and its time: what it predicts, what it leaves out, and that it ends when it said.

Mostly by a clock that is only told what things take.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from test_tune_search import FLOOR, LAYERS, plan_of
from typer.testing import CliRunner

from mlxmoe.cli.commands import app
from mlxmoe.memory.plan import replan
from mlxmoe.tuning import bench as benches
from mlxmoe.tuning.bench import EngineBench
from mlxmoe.tuning.pace import PASSES, Pace
from mlxmoe.tuning.search import Point, Search
from mlxmoe.tuning.tuned_report import TuneRow, explain, is_most

LATE = 1.2  # of the time
READ_PER_S = 1e9


class SlowCache(KVCache):
    """Of a type that cannot be filled but by prefilling."""


@dataclass
class SlowEngine:
    """Does nothing, which takes its clock `pass_s(tokens)` for a token after others, `fill_s(tokens)` to fill a cache
    and `chunk_s(tokens)` for a chunk of a prompt after others."""

    pass_s: Callable[[int], float]
    fill_s: Callable[[int], float] = lambda tokens: 0.0
    chunk_s: Callable[[int], float] = lambda tokens: 0.0
    chunk: int = 512
    layers: int = 1
    kind: type[KVCache] = KVCache
    now: float = 0.0
    plan: Any = field(default_factory=lambda: plan_of(64))
    decoded: list[int] = field(default_factory=list)  # the contexts after which tokens were
    tokenizer: Any = field(default_factory=lambda: SimpleNamespace(encode=lambda text, **_: [7]))

    @property
    def decoder(self) -> SlowEngine:
        return self

    def new_cache(self) -> list[KVCache]:
        caches = [self.kind() for _ in range(self.layers)]
        for cache in caches:
            cache.engine = self
        return caches

    def prefill(self, tokens: Sequence[int], cache: list[KVCache]) -> None:
        for _ in self.prefill_steps(tokens, cache):
            pass

    def prefill_steps(self, tokens: Sequence[int], cache: list[KVCache]) -> Iterator[int]:
        for seen in range(0, len(tokens), self.chunk):
            count = min(self.chunk, len(tokens) - seen)
            self.now += self.chunk_s(seen) * count / self.chunk
            for one in cache:
                one.keys, one.values, one.offset = mx.zeros((1, 1, 16, 1)), mx.zeros((1, 1, 16, 1)), seen + count
            yield seen + count

    def stretched(self, cache: KVCache, tokens: int) -> Any:
        self.now += self.fill_s(tokens) / self.layers
        cache.keys, cache.values, cache.offset = mx.zeros((1, 1, 16, 1)), mx.zeros((1, 1, 16, 1)), tokens
        return cache.state

    def generate(self, prompt: Sequence[int], cache: list[KVCache], sampler: object) -> Iterator[None]:
        while True:
            self.now += self.pass_s(cache[0].offset)
            self.decoded.append(cache[0].offset)
            yield

    def resize(self, nbytes: int) -> None:
        self.now += max(0, nbytes - self.plan.bank_bytes) / READ_PER_S
        self.plan = replan(self.plan, LAYERS, nbytes)

    def stats(self) -> Any:
        return SimpleNamespace(bytes_read=0, early_bytes=0, hits=1, misses=0)

    def bench(self, budget_s: float) -> EngineBench:
        return EngineBench(self, [], lambda: None, lambda: self.now, budget_s, READ_PER_S)  # type: ignore[arg-type]

    def search(self, contexts: Sequence[int], budget_s: float) -> Search:
        points = [Point(context, plan_of(min(context, 16384))) for context in sorted(contexts)]
        return Search(
            points, lambda plan, nbytes: replan(plan, LAYERS, nbytes), FLOOR, self.bench(budget_s),
            clock=lambda: self.now, deadline=budget_s,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def filled_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fills a cache is the engine that it is of."""
    own = benches._stretched

    def stretched(cache: Any, state: Any, seen: int, tokens: int) -> Any:
        engine = getattr(cache, "engine", None)
        return own(cache, state, seen, tokens) if engine is None else engine.stretched(cache, tokens)

    monkeypatch.setattr(benches, "_stretched", stretched)


costs = st.floats(0, 10)
lengths = st.integers(1, 10**7)


@given(costs, costs, st.lists(lengths, min_size=1), lengths)
def test_no_context_takes_more_than_its_bound_where_time_grows_by_length_at_most(
    flat_s: float, each_s: float, seen: list[int], tokens: int
) -> None:
    pace = Pace()
    for length in seen:
        pace.note(length, each_s * length, flat_s + each_s * length)
    needed = each_s * tokens + PASSES * (flat_s + each_s * tokens)
    assert pace.needed_s(tokens) >= needed * (1 - 1e-9)
    if tokens in seen:
        assert pace.needed_s(tokens) == pytest.approx(needed)


@given(costs, costs, lengths, costs)
def test_what_is_in_reach_takes_no_longer(flat_s: float, each_s: float, seen: int, seconds: float) -> None:
    pace = Pace()
    pace.note(seen, each_s * seen, flat_s + each_s * seen + 1e-9)
    reach = pace.reach(seconds)
    assert reach == seen or (seen < reach and pace.needed_s(reach) <= seconds)
    assert pace.needed_s(2 * reach) > seconds


def by_length(flat_s: float, each_s: float, power: float = 1.0) -> Callable[[int], float]:
    return lambda tokens: flat_s + each_s * tokens**power


@pytest.mark.parametrize("power", [1.0, 1.3])  # the longer, the slower for each: what outgrows a cache
@pytest.mark.parametrize("flat_s", [0.001, 0.1, 1.0])
@pytest.mark.parametrize("each_s", [0.0, 1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("budget_s", [5.0, 60.0])
def test_it_ends_in_time_whatever_contexts_take(flat_s: float, each_s: float, power: float, budget_s: float) -> None:
    """A pass cannot be stopped: later than that it never ends."""
    engine = SlowEngine(by_length(flat_s, each_s, power), by_length(0.0, 3 * each_s, power))
    search = engine.search([4096, 65536, 2**24], budget_s)
    search.run()
    assert engine.now <= budget_s + max(map(engine.pass_s, engine.decoded)) + 3 * engine.fill_s(4096)
    assert engine.now <= LATE * budget_s or engine.pass_s(2048) + engine.fill_s(2048) > 0.2 * budget_s
    assert {row.point.context for row in search.rows} == {4096, 65536, 2**24}
    assert all((row.decoded.tokens > 0) != (row.decoded.overrun is not None) for row in search.rows)


def test_a_context_far_too_long_is_not_begun_and_costs_the_others_little() -> None:
    engine = SlowEngine(by_length(0.01, 1e-5), by_length(0.0, 1e-5))
    search = engine.search([4096, 2**24], 20.0)
    assert not search.run()
    assert max(engine.decoded) < 2**20
    (left,) = [row for row in search.rows if row.point.context == 2**24]
    assert left.decoded.overrun is not None
    assert "filling it and decoding with it full may take" in left.decoded.overrun
    assert sum(row.repeats for row in search.rows if row.usable) > 4, "other slots, and the fastest again"


def test_a_slow_model_shows_long_contexts_where_its_weights_take_the_time() -> None:
    """Two tokens a second, whatever the context: in proportion to its length, none of these would be begun."""
    search = SlowEngine(by_length(0.5, 0.0)).search([4096, 16384, 131072], 60.0)
    search.run()
    assert {row.point.context for row in search.rows if row.usable} == {4096, 16384, 131072}


def test_the_first_context_is_measured_at_one_token_a_second_in_twenty_seconds() -> None:
    search = SlowEngine(by_length(1.0, 0.0)).search([4096], 20.0)
    search.run()
    assert any(row.usable for row in search.rows)


def test_a_model_of_which_a_token_takes_all_the_time_is_stopped_after_it() -> None:
    engine = SlowEngine(by_length(30.0, 0.0))
    search = engine.search([4096, 8192], 20.0)
    assert not search.run()
    assert engine.now == 30.0
    assert [row.decoded.overrun for row in search.rows] == [
        "trying out a shorter one may take 60.0 s, and 0.0 s were left",
        "no time was left",
    ]


@pytest.mark.parametrize("grows_s", [0.0, 0.01])
def test_what_is_prefilled_ends_in_time_too(grows_s: float) -> None:
    """`grows_s`: what each chunk takes more than the one before, as attention does."""
    engine = SlowEngine(by_length(0.01, 0.0), chunk_s=by_length(0.1, grows_s / 512), kind=SlowCache)
    search = engine.search([4096, 2**17], 20.0)
    search.run()
    assert engine.now <= LATE * 20.0
    assert next(row.usable for row in search.rows if row.point.context == 4096)
    assert not any(row.usable for row in search.rows if row.point.context == 2**17)


def beyond(tokens: int, short_s: float, long_s: float) -> Callable[[int], float]:
    """What nothing foretells: a context longer than `tokens` takes far more."""
    return lambda length: long_s if length > tokens else short_s


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (SlowEngine(beyond(2048, 0.01, 6.0)), "a token more may take 6.0 s, and 4.0 s were left"),
        (SlowEngine(by_length(0.01, 0.0), beyond(2048, 0.01, 40.0), layers=8), "filling its KV cache takes 35.0 s"),
        (SlowEngine(by_length(0.01, 0.0), chunk_s=beyond(0, 0.1, 3.0), kind=SlowCache), "prefilling it takes"),
    ],
)
def test_what_turns_out_too_slow_on_the_way_is_stopped(engine: SlowEngine, says: str) -> None:
    seen = engine.bench(10.0).decode(Point(4096, plan_of(4096)), 1.0)
    assert (seen.overrun or "").startswith(says), seen.overrun
    assert engine.now < 10.0


def test_one_token_is_enough_where_there_is_no_time_for_another() -> None:
    engine = SlowEngine(beyond(2048, 0.01, 3.0))
    seen = engine.bench(8.0).decode(Point(4096, plan_of(4096)), 1.0)
    assert (seen.tokens, seen.overrun) == (1, None)
    assert engine.now < 8.0


def test_slots_that_take_too_long_to_read_are_not_added() -> None:
    engine = SlowEngine(by_length(0.001, 0.0), plan=replan(plan_of(64), LAYERS, FLOOR))
    bench = engine.bench(0.1)
    seen = bench.decode(Point(64, plan_of(64)), 0.05)
    assert seen.overrun is not None
    assert "reading its experts may take" in seen.overrun
    assert engine.now == 0


def row_of(context: int, overrun: str | None = None, share: float = 1.0) -> TuneRow:
    plan = replan(plan_of(context), LAYERS, int(plan_of(context).bank_bytes * share))
    seen = 0 if overrun else 10
    return TuneRow(context, plan, share, float(seen), seen, None, None, None, None, overrun)


def test_what_was_left_out_is_named_once() -> None:
    rows = [row_of(4096), row_of(4096, "late", 0.5), row_of(8192, "no time"), row_of(8192, "late", 0.5)]
    said = list(explain(rows, rows[0], None))
    (unseen,) = [line for line in said if line.startswith("context 8192")]
    assert unseen.endswith("was not measured: no time. Give it a longer budget, or a shorter context")
    (others,) = [line for line in said if line.startswith("There was no time left for ")]
    assert "context 4096" in others
    assert "8192" not in others


def test_slots_that_were_left_out_do_not_make_fewer_ones_a_choice() -> None:
    half, all_of_them = row_of(4096, share=0.5), row_of(4096)
    assert not is_most(half, [half, all_of_them])
    assert is_most(half, [half, row_of(4096, "no time")])


@pytest.mark.slow
def test_a_tuning_with_contexts_far_too_long_ends_in_its_time() -> None:
    start = time.perf_counter()
    said = ["--budget", "8s", "--no-save", "--memory", "4GB", "--context", "256,128k,256k"]
    done = CliRunner().invoke(app, ["tune", *said])
    took = time.perf_counter() - start
    assert done.exit_code == 0, done.output
    assert "no time" in done.stdout
    seconds = re.search(r"measured for (\d+) s", done.stdout)
    assert seconds is not None
    assert int(seconds[1]) <= 8 * LATE
    assert took <= 8 * LATE + 10, "with loading"
