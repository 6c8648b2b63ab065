"""The cases that one process can measure: everything resident, a warm page cache.

Each case is a function of a Bench that yields rows; one that cannot run here raises SkippedError with the reason.

Legend: E experts, K experts a token (top_k), T tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from bench_child import Child
from bench_reads import CountedReads, fill_page_cache, plain_read_rate
from bench_report import Row, Target, row_of
from bench_sequence import WARM_UP, TokenSequence, recorded_routing, sequence_for
from bench_subject import Subject, equal, in_pairs, open_engine, sizes_of
from mlx_lm.generate import stream_generate

from mlxmoe import Engine
from mlxmoe.experts.switch import switch_modules

# Its annotations are partial: what it yields is Any here.
stock_stream: Any = stream_generate

SHARES = {"a quarter": 0.25, "half": 0.5, "three quarters": 0.75}


class SkippedError(Exception):
    """This case cannot be measured here, and why."""


@dataclass
class Bench:
    """What all cases share: the model, the tokens, how often to measure. `say` tells what is being done."""

    model: Path
    folder: Path
    steps: int
    repeats: int
    prefill_tokens: tuple[int, int]
    read_rate: float
    trace: Path | None = None
    seed: int = 0
    say: Callable[[str], None] = lambda text: None
    facts: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def _stock(self) -> tuple[nn.Module, Any]:
        self.say("loading mlx-lm's model")
        fill_page_cache(self.model)
        model, tokenizer = mlx_lm.load(str(self.model))[:2]
        return model, tokenizer

    @property
    def stock(self) -> nn.Module:
        """mlx-lm's model with everything resident, loaded once."""
        return self._stock[0]

    @property
    def tokenizer(self) -> Any:
        return self._stock[1]

    @cached_property
    def vocab(self) -> int:
        return int(Subject(self.stock).run([0]).shape[-1])

    @cached_property
    def top_k(self) -> int:
        """K of the model."""
        with recorded_routing(self.stock) as routing:
            Subject(self.stock).run([0])
        return len(routing[0])

    @cached_property
    def sequence(self) -> TokenSequence:
        """The tokens that decode runs: WARM_UP and then `steps`."""
        self.say("choosing tokens by their experts")
        made = sequence_for(self.stock, self.model, self.vocab, self.steps, self.seed, self.folder)
        self.facts["lru_hit_rates"] = dict(zip(SHARES, made.hit_rates, strict=False))
        return made

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of the trunk, of all experts, of one expert."""
        return sizes_of(self.stock)

    def prompt(self, count: int) -> list[int]:
        """Random tokens, always the same."""
        tokens: list[int] = np.random.default_rng(self.seed).integers(0, self.vocab, count).tolist()
        return tokens

    def sequence_misses(self, share: float) -> float:
        """Experts that an LRU over a quarter (0.25) or half (0.5) of them misses a token, in all layers together."""
        layers = len(switch_modules(self.stock))
        return (1 - self.sequence.hit_rates[share == 0.5]) * layers * self.top_k


# --- everything resident ------------------------------------------------------------------------------------


def resident(bench: Bench) -> Iterator[Row]:
    """Decode and prefill with all experts in memory, beside mlx-lm: plain loops, and both libraries' own loops."""
    with open_engine(bench.model, "all") as engine:
        yield _decode(bench, engine, "resident", "decode speed, all resident, plain loops", speed=True)
        yield _loops(bench, engine)
        yield from _prefills(bench, engine, "resident", bench.prefill_tokens[1], CountedReads(), speed=True)


def _loops(bench: Bench, engine: Engine) -> Row:
    """Greedy replies of the public streams, both a step ahead of what they hand out."""
    prompt, count = bench.sequence.tokens[:WARM_UP], max(8, bench.steps // 4)

    def seconds_and_tokens(stream: Iterator[Any]) -> tuple[float, list[int]]:
        tokens = [next(stream).token]
        began = time.perf_counter()
        tokens += [chunk.token for chunk in stream]
        return (time.perf_counter() - began) / max(1, len(tokens) - 1), tokens

    ratios, exact, pairs = [], True, 2 * bench.repeats - 1
    for n in range(pairs):
        bench.say(f"resident: streams, {n + 1} of {pairs}")
        streams: dict[str, Callable[[], Iterator[Any]]] = {
            "ours": lambda: engine.stream(prompt, max_tokens=count),
            "stock": lambda: stock_stream(bench.stock, bench.tokenizer, prompt, max_tokens=count),
        }
        names = sorted(streams, reverse=n % 2 == 1)
        found = {name: seconds_and_tokens(streams[name]()) for name in names}
        ratios.append(found["stock"][0] / found["ours"][0])
        shortest = min(len(found["ours"][1]), len(found["stock"][1]))
        exact = exact and found["ours"][1][:shortest] == found["stock"][1][:shortest]
    what = "decode speed, all resident, stream against stream_generate"
    return row_of("resident", what, ratios, target=Target(">=", 0.98), exact=exact, details={"tokens": count})


def load_time(bench: Bench) -> Iterator[Row]:
    """`load` against `mlx_lm.load`, each in processes of its own, by turns, the page cache warm.

    A model's first load on a machine has to find out what its prefill needs; later ones have that from the cache.
    """
    fill_page_cache(bench.model)
    times: dict[str, list[float]] = {"stock": [], "first": [], "later": []}
    for n in range(max(3, bench.repeats)):
        bench.say(f"load: {n + 1} of {max(3, bench.repeats)}")
        with TemporaryDirectory() as cache:
            for what in ("stock", "first", "later") if n % 2 else ("first", "later", "stock"):
                kind = "stock" if what == "stock" else "ours"
                with Child(kind=kind, model=str(bench.model), experts="all", cache=cache) as child:
                    times[what].append(child.load_s)
    stock = times.pop("stock")
    for what, ours in times.items():
        yield row_of(
            "load",
            f"load time to mlx-lm's, all resident, {'a first' if what == 'first' else 'any later'} load of a model",
            [a / b for a, b in zip(ours, stock, strict=True)],
            target=Target("<=", 1.1) if what == "later" else None,
            details={"ours_s": statistics.median(ours), "stock_s": statistics.median(stock)},
        )


# --- decode, the page cache warm ----------------------------------------------------------------------------


def warm(bench: Bench) -> Iterator[Row]:
    """Decode steps with a part of the experts in slots, the others in the page cache."""
    bounds = {"a quarter": 1.10, "half": 1.06}
    for name, share in SHARES.items():
        counted = CountedReads()
        with open_engine(bench.model, share, counted) as engine:
            target = Target("<=", bounds[name]) if name in bounds else None
            yield _decode(bench, engine, "warm", f"decode step to stock, {name}", target=target, counted=counted)


def _decode(
    bench: Bench,
    engine: Engine,
    case: str,
    what: str,
    *,
    target: Target | None = None,
    counted: CountedReads | None = None,
    speed: bool = False,
) -> Row:
    """Steps in pairs over the sequence; `speed`: stock's time by ours, not ours by stock's."""
    bench.say(f"{case}: {what}")
    ours, stock, tokens = Subject.of(engine), Subject(bench.stock), bench.sequence.tokens
    for token in tokens[:WARM_UP]:
        ours.run([token])
        stock.run([token])
    before = engine.stats()
    if counted is not None:
        counted.clear()
    measured = tokens[WARM_UP:]
    times, stock_times, exact = in_pairs(
        lambda n: ours.run([measured[n]]), lambda n: stock.run([measured[n]]), len(measured), equal
    )
    after = engine.stats()
    misses = after.misses - before.misses
    hits = after.hits - before.hits
    step, stock_step = statistics.median(times), statistics.median(stock_times)
    details: dict[str, Any] = {"ours_s": step, "stock_s": stock_step}
    of_limit = step / stock_step
    if counted is not None and counted.reads:
        rate = plain_read_rate(counted.reads)
        read = misses * bench.sizes[2] / len(measured) / rate
        of_limit = statistics.median(a / max(b, read) for a, b in zip(times, stock_times, strict=True))
        details |= {"read_bytes_per_s": rate, "read_s": read, "hit_rate": hits / max(1, hits + misses)}
    pairs = zip(times, stock_times, strict=True)
    ratios = [stock / ours if speed else ours / stock for ours, stock in pairs]
    details["slots"] = sorted({layer.slots for layer in engine.stats().layers})
    target = Target(">=", 0.98) if speed else target
    return row_of(case, what, ratios, target=target, of_limit=of_limit, exact=exact, details=details)


# --- prefill ------------------------------------------------------------------------------------------------


def prefill(bench: Bench) -> Iterator[Row]:
    """One chunk at a quarter of the experts, page cache warm, and how often each expert's bytes were asked for."""
    counted = CountedReads()
    with open_engine(bench.model, 0.25, counted) as engine:
        long, short = bench.prefill_tokens
        yield from _prefills(bench, engine, "prefill", short, counted, target=Target("<=", 1.02))
        yield from _prefills(bench, engine, "prefill", long, counted)


def _prefills(
    bench: Bench,
    engine: Engine,
    case: str,
    count: int,
    counted: CountedReads,
    *,
    target: Target | None = None,
    speed: bool = False,
) -> Iterator[Row]:
    prompt = bench.prompt(count)
    asked: list[int] = []
    for caches_only in (False, True):
        how = "as the loops do: caches only" if caches_only else "caches and logits"
        what = f"prefill {'speed' if speed else 'to stock'}, {count} tokens, {how}"
        runs = min(3, bench.repeats)  # long ones
        bench.say(f"{case}: {what}")

        def ours(_: int) -> mx.array:
            counted.clear()
            logits = Subject.of(engine).run(prompt, caches_only=caches_only)  # noqa: B023  # called at once
            asked.append(counted.most_often)
            return logits

        def stock(_: int) -> mx.array:
            return Subject(bench.stock).run(prompt, caches_only=caches_only)  # noqa: B023

        times, stock_times, exact = in_pairs(ours, stock, runs, None if caches_only else equal)
        ratios = [b / a if speed else a / b for a, b in zip(times, stock_times, strict=True)]
        details: dict[str, Any] = {"ours_s": statistics.median(times), "stock_s": statistics.median(stock_times)}
        limit = details["stock_s"]
        if counted.reads:
            rate = plain_read_rate(counted.reads)
            details |= {"read_bytes": counted.nbytes, "read_bytes_per_s": rate}
            limit = max(limit, counted.nbytes / rate)
        wanted = target if not caches_only else None
        yield row_of(
            case,
            what,
            ratios,
            target=Target(">=", 0.98) if speed else wanted,
            of_limit=details["ours_s"] / limit,
            exact=None if caches_only else exact,
            details=details,
        )
    if any(asked):
        yield Row(
            case,
            f"most often that an expert's bytes were asked for, {count} tokens",
            max(asked),
            "times",
            len(asked),
            target=Target("<=", 1),
        )


# --- time to first token ------------------------------------------------------------------------------------


def ttft(bench: Bench) -> Iterator[Row]:
    """From a prompt to its reply's first chunk: `Engine.stream` against mlx-lm's `stream_generate`."""
    prompt = bench.prompt(bench.prefill_tokens[1] // 2)
    for name, share in {"all": 1.0, **SHARES}.items():
        if name == "three quarters":
            continue
        bench.say(f"ttft: {name}")
        counted = CountedReads()
        with open_engine(bench.model, "all" if name == "all" else share, counted) as engine:
            times, stock_times, exact = in_pairs(
                lambda n: next(engine.stream(prompt, max_tokens=1)).token,
                lambda n: next(stock_stream(bench.stock, bench.tokenizer, prompt, max_tokens=1)).token,
                bench.repeats,
                lambda ours, stock: bool(ours == stock),
            )
            limit = statistics.median(stock_times)
            if counted.reads:
                limit = max(limit, counted.nbytes / len(times) / plain_read_rate(counted.reads))
        yield row_of(
            "ttft",
            f"time to first token to stock, {len(prompt)} tokens, {name}",
            [ours / stock for ours, stock in zip(times, stock_times, strict=True)],
            of_limit=statistics.median(times) / limit,
            exact=exact,
            details={"ours_s": statistics.median(times), "stock_s": statistics.median(stock_times)},
        )
