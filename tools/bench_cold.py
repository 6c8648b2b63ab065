"""The cases whose page cache is cold: within a memory limit, and the rate that reads reach."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator

from bench_cases import SHARES, Bench, SkippedError
from bench_child import memory_group, run_child
from bench_reads import CountedReads, can_drop_page_cache, drop_page_cache, plain_read_rate
from bench_report import Row, Target, row_of
from bench_sequence import WARM_UP
from bench_subject import Subject, num_experts, open_engine, switch_modules

ROOM_BYTES = 40_000_000  # beyond trunk and bank


def cold(bench: Bench) -> Iterator[Row]:
    """Decode in a control group of trunk, bank and 40 MB, its page cache dropped first; stock outside of it."""
    bounds = {"a quarter": 1.35, "half": 1.12}
    trunk_bytes, _, expert_bytes = bench.sizes
    tokens = bench.sequence.tokens
    for name, share in SHARES.items():
        modules = switch_modules(bench.stock).values()
        bank_bytes = sum(int(num_experts(module) * share) for module in modules) * expert_bytes
        ratios, totals, room, exact, founds = [], [], [], True, []
        task = {"model": str(bench.model), "tokens": tokens, "warm_up": WARM_UP}
        for n in range(3):
            bench.say(f"cold: {name}, {n + 1} of 3")
            found = {}
            for kind in ("ours", "stock") if n % 2 == 0 else ("stock", "ours"):
                if kind == "stock":
                    found[kind] = run_child(kind=kind, **task)
                    continue
                try:
                    with memory_group(f"mlxmoe-bench-{os.getpid()}", trunk_bytes + bank_bytes + ROOM_BYTES) as group:
                        drop_page_cache(bench.model)
                        found[kind] = run_child(kind=kind, **task, experts=share, group=str(group), memory="16GB")
                except OSError as error:
                    raise SkippedError(
                        f"no control group of version 1 with a memory limit can be made: {error}"
                    ) from error
            ours, stock = found["ours"], found["stock"]
            ratios += [a / b for a, b in zip(ours["seconds"], stock["seconds"], strict=True)]
            totals.append(sum(ours["seconds"]) / sum(stock["seconds"]))
            room.append((ours["anonymous_bytes"] - trunk_bytes - bank_bytes) / 1e6)
            exact = exact and ours["digest"] == stock["digest"]
            founds.append(found)
        ours_s, stock_s = (statistics.mean(f[kind]["load_s"] for f in founds) for kind in ("ours", "stock"))
        details = {
            "ratio_of_totals": totals,
            "load_s": {"ours": ours_s, "stock": stock_s},
            **{key: [f["ours"][key] for f in founds] for key in ("read_bytes", "disk_bytes", "busy_s", "slots")},
            "memory_events": [f["ours"]["memory_events"] for f in founds],
        }
        steps = len(tokens) - WARM_UP
        stock_step = statistics.mean(s for f in founds for s in f["stock"]["seconds"])
        our_step = statistics.mean(s for f in founds for s in f["ours"]["seconds"])
        read_s = statistics.mean(f["ours"]["busy_s"] for f in founds) / steps
        yield row_of(
            "cold",
            f"decode step to stock, {name}, trunk + bank + 40 MB",
            ratios,
            target=Target("<=", bounds[name]) if name in bounds else None,
            of_limit=our_step / max(stock_step, read_s),
            exact=exact,
            details=details,
        )
        yield row_of("cold", f"memory beyond trunk and bank, {name}", room, "MB", target=Target("<=", 40))


def read_rate(bench: Bench) -> Iterator[Row]:
    """What reads reach from a cold page cache in a prefill, against the same reads by four plain threads."""
    if not can_drop_page_cache():
        raise SkippedError("this system has no posix_fadvise to drop a file's page cache with")
    counted = CountedReads()
    rates, plain, ratios = [], [], []
    prompt = bench.prompt(64)
    for n in range(max(3, bench.repeats)):
        bench.say(f"read-rate: {n + 1} of {max(3, bench.repeats)}")
        with open_engine(bench.model, 0.25, counted) as engine:
            counted.clear()
            drop_page_cache(bench.model)
            Subject.of(engine).run(prompt)
            reads = list(counted.reads)
            rates.append(counted.nbytes / counted.busy_s)
            drop_page_cache(bench.model)
            plain.append(plain_read_rate(reads))
            ratios.append(rates[-1] / plain[-1])
    details = {"bytes_per_s": statistics.median(rates), "plain_bytes_per_s": statistics.median(plain)}
    what = "read rate in prefill to that of plain reads"
    yield row_of("read-rate", what, ratios, target=Target(">=", 0.85), details=details)
