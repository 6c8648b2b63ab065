"""The cases whose page cache is cold: within a memory limit, and the rate that reads reach.

What a virtual disk's host keeps cached is not in our hands: reads are judged beside plain ones of the same minute.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from bench_cases import SHARES, Bench, SkippedError
from bench_child import Child, memory_group
from bench_reads import CountedReads, can_drop_page_cache, drop_page_cache, plain_read_rate
from bench_report import Row, Target, row_of
from bench_sequence import WARM_UP
from bench_subject import num_experts, open_engine

from mlxmoe.experts.switch import switch_modules

ROOM_BYTES = 40_000_000  # beyond trunk and bank
MEMORY = "1000GB"  # for the plan: what bounds the process is the group


def cold(bench: Bench) -> Iterator[Row]:
    """Decode in a control group of trunk, bank and 40 MB, its page cache dropped first; stock outside of it."""
    if not can_drop_page_cache():
        raise SkippedError("this system has no posix_fadvise to drop a file's page cache with")
    bounds = {"a quarter": 1.35, "half": 1.12}
    trunk_bytes, _, expert_bytes = bench.sizes
    for name, share in SHARES.items():
        modules = switch_modules(bench.stock).values()
        bank_bytes = sum(int(num_experts(module) * share) for module in modules) * expert_bytes
        runs = []
        for n in range(1 if bench.repeats == 1 else 3):
            bench.say(f"cold: {name}, run {n + 1}")
            runs.append(_in_group(bench, share, trunk_bytes + bank_bytes + ROOM_BYTES))
        pairs = [pair for run in runs for pair in run["pairs"]]
        read_s = statistics.mean(run["ours"]["busy_s"] for run in runs) / len(runs[0]["pairs"])
        ours_s, stock_s = (statistics.mean(pair[which] for pair in pairs) for which in (0, 1))
        names = ("read_bytes", "disk_bytes", "busy_s", "slots", "memory_events")
        details = {"ours_s": ours_s, "stock_s": stock_s, "read_s": read_s, "ratio_of_means": ours_s / stock_s}
        details |= {key: [run["ours"][key] for run in runs] for key in names}
        yield row_of(
            "cold",
            f"decode step to stock, {name}, trunk + bank + 40 MB",
            [ours / stock for ours, stock in pairs],
            target=Target("<=", bounds[name]) if name in bounds else None,
            of_limit=ours_s / max(stock_s, read_s),
            exact=all(run["ours"]["digest"] == run["stock"]["digest"] for run in runs),
            details=details,
        )
        beyond = [(run["ours"]["anonymous_bytes"] - trunk_bytes - bank_bytes) / 1e6 for run in runs]
        yield row_of("cold", f"memory beyond trunk and bank, {name}", beyond, "MB", target=Target("<=", 40))


def _in_group(bench: Bench, share: float, limit_bytes: int) -> dict[str, Any]:
    """Steps in pairs, ours by a process in a group of `limit_bytes`, stock by one outside, each first by turns."""
    model, tokens = str(bench.model), bench.sequence.tokens
    with ExitStack() as stack:
        stock = stack.enter_context(Child(kind="stock", model=model))  # reads no file any more
        try:
            group = stack.enter_context(memory_group(f"mlxmoe-bench-{os.getpid()}", limit_bytes))
        except OSError as error:
            raise SkippedError(f"no control group of version 1 with a memory limit can be made: {error}") from error
        drop_page_cache(bench.model)
        ours = stack.enter_context(Child(kind="ours", model=model, experts=share, group=str(group), memory=MEMORY))
        pairs = []
        for n, token in enumerate(tokens):
            if n == WARM_UP:
                ours.warmed_up()
            seconds = {child: child.step(token) for child in ((ours, stock) if n % 2 == 0 else (stock, ours))}
            pairs.append((seconds[ours], seconds[stock]))
        return {"pairs": pairs[WARM_UP:], "ours": ours.report(), "stock": stock.report()}


def read_rate(bench: Bench) -> Iterator[Row]:
    """What reads that fill slots reach from a cold page cache, against the same reads by four plain threads."""
    if not can_drop_page_cache():
        raise SkippedError("this system has no posix_fadvise to drop a file's page cache with")
    counted = CountedReads()
    rates, plain = [], []
    runs = max(3, bench.repeats)
    with open_engine(bench.model, 0.25, counted) as engine:
        engine.resize("all")
        for n in range(runs):
            bench.say(f"read-rate: {n + 1} of {runs}")
            for which in ("ours", "plain") if n % 2 == 0 else ("plain", "ours"):
                drop_page_cache(bench.model)
                if which == "plain":
                    plain.append(plain_read_rate(counted.reads))
                else:
                    engine.resize("25%")
                    counted.clear()
                    engine.resize("all")
                    rates.append(counted.nbytes / counted.busy_s)
    details = {"bytes_per_s": statistics.median(rates), "plain_bytes_per_s": statistics.median(plain)}
    ratios = [a / b for a, b in zip(rates, plain, strict=True)]
    what = "read rate while slots are filled to that of plain reads"
    yield row_of("read-rate", what, ratios, target=Target(">=", 0.85), details=details)
