"""The cases at declared read rates: how well reads hide behind compute, on any machine.

A step at best: the trunk, then in each layer the experts that are there while the missing ones are read, then those.

Legend: K experts a token (top_k).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from bench_cases import Bench, SkippedError
from bench_reads import CountedReads, DeclaredRate
from bench_report import Row, Target, row_of
from bench_sequence import WARM_UP, recorded_routing
from bench_subject import Subject, equal, in_pairs, no_garbage_collection, num_experts, open_engine, width

from mlxmoe import Engine
from mlxmoe.experts.switch import switch_modules


def rate(bench: Bench) -> Iterator[Row]:
    """Decode and prefill with reads at the declared rate, and at one as fast as the compute that can hide them."""
    misses, layers, share = bench.sequence_misses(0.5), len(switch_modules(bench.stock)), layers_share(bench)
    # So that the missing experts take as long to read as the others to compute, on average.
    even = misses * bench.sizes[2] / (step_seconds(bench) * share * (1 - misses / layers / bench.top_k))
    for name, bytes_per_s in {"as declared": bench.read_rate, "as slow as compute": even}.items():
        yield _decode(bench, f"half, reads {name}", 0.5, bytes_per_s, share, target=Target("<=", 1.15))
    yield _decode(bench, "a quarter, reads as declared", 0.25, bench.read_rate, share)
    yield from _prefill(bench)


def layers_share(bench: Bench) -> float:
    """What part of a stock decode step the experts take, measured by turns with whole steps."""
    bench.say("the experts' part of a step")
    modules = list(switch_modules(bench.stock).values())
    x = mx.random.normal((1, 1, width(modules[0])), key=mx.random.key(bench.seed))
    count, subject, shares = num_experts(modules[0]), Subject(bench.stock), []
    with no_garbage_collection():
        for n, token in enumerate(bench.sequence.tokens[: max(8, bench.steps // 2)]):
            indices = mx.array([[[(n + k) * 7 % count for k in range(bench.top_k)]]])
            mx.eval(x, indices)
            began = time.perf_counter()
            for module in modules:
                mx.eval(module(x, indices))
            between = time.perf_counter()
            subject.run([token])
            shares.append((between - began) / (time.perf_counter() - between))
    return min(1.0, statistics.median(shares))


def step_seconds(bench: Bench) -> float:
    """Of a stock decode step."""
    subject, seconds = Subject(bench.stock), []
    for token in bench.sequence.tokens[:WARM_UP]:
        began = time.perf_counter()
        subject.run([token])
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _decode(
    bench: Bench, what: str, slots: float, bytes_per_s: float, share: float, *, target: Target | None = None
) -> Row:
    bench.say(f"rate: decode, {what}, {bytes_per_s / 1e6:.0f} MB/s")
    slow, tokens = DeclaredRate(bytes_per_s), bench.sequence.tokens
    top_k, expert_bytes = bench.top_k, bench.sizes[2]
    with open_engine(bench.model, slots, slow) as engine:
        ours, stock = Subject.of(engine), Subject(bench.stock)
        for token in tokens[:WARM_UP]:
            ours.run([token])
            stock.run([token])
        counts = [[layer.misses for layer in engine.stats().layers]]
        measured = tokens[WARM_UP:]

        def noted(logits: mx.array, others: mx.array) -> bool:
            counts.append([layer.misses for layer in engine.stats().layers])
            return equal(logits, others)

        times, stock_times, exact = in_pairs(
            lambda n: ours.run([measured[n]]), lambda n: stock.run([measured[n]]), len(measured), noted
        )
    limits = []
    for stock_s, (before, after) in zip(stock_times, itertools.pairwise(counts), strict=True):
        layer_s = share * stock_s / len(before)
        limit = (1 - share) * stock_s
        for missing in (b - a for a, b in zip(before, after, strict=True)):
            there = (1 - missing / top_k) * layer_s
            limit += max(there, missing * expert_bytes / bytes_per_s) + missing / top_k * layer_s
        limits.append(limit)
    ratios = [step / limit for step, limit in zip(times, limits, strict=True)]
    misses = sum(counts[-1]) - sum(counts[0])
    details: dict[str, Any] = {
        "bytes_per_s": bytes_per_s,
        "ours_s": statistics.median(times),
        "stock_s": statistics.median(stock_times),
        "limit_s": statistics.median(limits),
        "experts_share": share,
        "read_s": misses * expert_bytes / bytes_per_s / len(times),
        "miss_rate": misses / len(times) / len(counts[0]) / top_k,
    }
    return row_of(
        "rate",
        f"decode step to max(hits, read) + misses, {what}",
        ratios,
        target=target,
        of_limit=statistics.median(ratios),
        exact=exact,
        details=details,
    )


def _prefill(bench: Bench) -> Iterator[Row]:
    count = bench.prefill_tokens[0]
    prompt = bench.prompt(count)
    bench.say("rate: prefill, compute alone")
    began = time.perf_counter()
    Subject(bench.stock).run(prompt)
    compute_s = time.perf_counter() - began
    even = bench.sizes[1] / compute_s
    for name, bytes_per_s in {"as declared": bench.read_rate, "as slow as compute": even}.items():
        bench.say(f"rate: prefill, {count} tokens, {bytes_per_s / 1e6:.0f} MB/s")
        counted = CountedReads(DeclaredRate(bytes_per_s))
        with open_engine(bench.model, 0.25, counted) as engine:
            times, stock_times, exact = in_pairs(
                lambda n: Subject.of(engine).run(prompt),  # called at once
                lambda n: Subject(bench.stock).run(prompt),
                1,
                equal,
            )
        read_s = counted.nbytes / bytes_per_s
        limit = max(stock_times[0], read_s)
        yield row_of(
            "rate",
            f"prefill to max(compute, read), {count} tokens, a quarter, reads {name}",
            [times[0] / limit],
            target=Target("<=", 1.2),
            of_limit=times[0] / limit,
            exact=exact,
            details={"ours_s": times[0], "stock_s": stock_times[0], "read_s": read_s, "bytes_per_s": bytes_per_s},
        )


# --- lookahead ----------------------------------------------------------------------------------------------


def lookahead(bench: Bench) -> Iterator[Row]:
    """Steps with lookahead to steps without, where reads dominate and where not, and how often it is right.

    Where they do not the engine finds out by itself, in its first steps. At best a step takes as long as the reads of
    what is missing, or as its compute: the share of a step without lookahead that this is is its bound.
    """
    bench.say("lookahead: recall")
    found = recall(bench)
    details = {"recall": found}
    yield Row("lookahead", "recall of the next layer's router on this layer's input", found, "x", 1, details=details)
    missing, step_s = bench.sequence_misses(0.25) * bench.sizes[2], step_seconds(bench)
    rates = {"dominate": missing / (2 * step_s), "do not": 50 * missing / step_s}
    for name, bytes_per_s in rates.items():
        bench.say(f"lookahead: reads {name}")
        slow = [DeclaredRate(bytes_per_s), DeclaredRate(bytes_per_s)]
        with (
            open_engine(bench.model, 0.25, slow[0], lookahead=name == "dominate" or "auto") as ahead,
            open_engine(bench.model, 0.25, slow[1], lookahead=False) as plain,
        ):
            one, other = Subject.of(ahead), Subject.of(plain)
            tokens = bench.sequence.tokens
            for token in tokens[:WARM_UP]:
                one.run([token])
                other.run([token])
            measured = tokens[WARM_UP:]
            before = [read_bytes(engine) for engine in (ahead, plain)]
            times, plain_times, exact = in_pairs(
                lambda n: one.run([measured[n]]),  # noqa: B023  # called at once
                lambda n: other.run([measured[n]]),  # noqa: B023
                len(measured),
                equal,
            )
            reads = [read_bytes(engine) - was for engine, was in zip((ahead, plain), before, strict=True)]
        read_s = [nbytes / bytes_per_s / len(times) for nbytes in reads]  # a step's
        limit_s, plain_s = max(step_s, read_s[1]), statistics.mean(plain_times)
        bound = 0.9 if name == "dominate" else 1.02
        yield row_of(
            "lookahead",
            f"decode step with lookahead to one without, a quarter, reads {name}",
            [a / b for a, b in zip(times, plain_times, strict=True)],
            target=Target("<=", bound) if found >= 0.7 or name != "dominate" else None,
            of_limit=statistics.mean(times) / limit_s,
            exact=exact,
            details={
                "bytes_per_s": bytes_per_s,
                "recall": found,
                "ours_s": statistics.median(times),
                "plain_s": statistics.median(plain_times),
                "read_s": read_s[0],
                "plain_read_s": read_s[1],
                "bound": limit_s / plain_s,
            },
        )


def read_bytes(engine: Engine) -> int:
    """What `engine` has read of experts so far, asked for or guessed."""
    stats = engine.stats()
    return stats.bytes_read + stats.early_bytes


def recall(bench: Bench) -> float:
    """How many of a layer's experts its router finds from the input of the MoE layer before it."""
    blocks = [layer.mlp for layer in bench.stock.layers if hasattr(getattr(layer, "mlp", None), "gate")]
    if len(blocks) < 2:
        raise SkippedError("this model's routers are not found at layers[n].mlp.gate")
    top_k, found = bench.top_k, []
    classes = [type(block) for block in blocks]
    inputs: list[mx.array] = []

    def hearing(stock_class: Any) -> type:
        def call(self: Any, x: mx.array) -> Any:
            inputs.append(x)
            return stock_class.__call__(self, x)

        return type(f"Hearing{stock_class.__name__}", (stock_class,), {"__call__": call})

    subject = Subject(bench.stock)
    try:
        for block, stock_class in zip(blocks, classes, strict=True):
            block.__class__ = hearing(stock_class)
        with recorded_routing(bench.stock) as routing:
            for token in bench.sequence.tokens[:WARM_UP]:
                inputs.clear()
                routing.clear()
                subject.run([token])
                for place in range(1, len(blocks)):
                    scores = blocks[place].gate(inputs[place - 1])
                    guess = mx.argpartition(-scores, kth=top_k - 1, axis=-1)[..., :top_k].flatten().tolist()
                    found.append(len(set(guess) & set(routing[place])) / top_k)  # type: ignore[arg-type]
    finally:
        for block, stock_class in zip(blocks, classes, strict=True):
            block.__class__ = stock_class
    return statistics.mean(found)
