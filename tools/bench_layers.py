"""The cases that call expert layers alone: the hit path, and a recorded trace.

Legend: E experts, K experts a token (top_k), D width.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from bench_cases import SHARES, Bench, SkippedError
from bench_reads import fill_page_cache
from bench_report import Row, Target, quartiles, row_of
from bench_sequence import WARM_UP, make_model
from bench_subject import Subject, equal, in_pairs, num_experts, open_engine, width

from mlxmoe.experts.switch import switch_modules

BATCHES = 10  # of calls of the hit path


def hit_path(bench: Bench) -> Iterator[Row]:
    """Host time of a layer whose wanted experts all have slots, above the stock layer and its one sync.

    That is the calling thread's processor time until the output is evaluated: the one starts to compute before it
    returns, the other when it is evaluated. What else runs on the machine only ever adds to it, by interrupts and by
    what it leaves in the processor's caches: so a value is the lower quartile of ours less stock's, of the same many
    calls by turns, and the row their median. Without lookahead, which has a case of its own.
    """
    runs = max(100, bench.steps * 8)
    top_k = bench.top_k
    with open_engine(bench.model, 0.5, lookahead=False) as engine:
        bench.say("hit path")
        with Subject.of(engine).layers() as layers:
            stock = list(switch_modules(bench.stock).values())
            x = mx.random.normal((1, 1, width(stock[0])), key=mx.random.key(bench.seed))
            scores = mx.zeros((1, 1, num_experts(stock[0])))
            scores[..., :top_k] = mx.arange(top_k) + 1.0
            mx.eval(x, scores)
            host_s: list[list[float]] = [[], []]

            def wanted() -> mx.array:
                """A router's last step, not evaluated."""
                return mx.argpartition(-scores, kth=top_k - 1, axis=-1)[..., :top_k]

            def ours(n: int) -> mx.array:
                began = time.thread_time()
                out: mx.array = layers[n % len(layers)](x, wanted())
                mx.eval(out)
                host_s[0].append(time.thread_time() - began)
                return out

            def stock_and_sync(n: int) -> mx.array:
                began = time.thread_time()
                indices = wanted()
                mx.eval(indices)
                out: mx.array = stock[n % len(stock)](x, indices)
                mx.eval(out)
                host_s[1].append(time.thread_time() - began)
                return out

            for n in range(2 * len(layers)):
                ours(n)
                stock_and_sync(n)
            host_s[0].clear()
            host_s[1].clear()
            times, stock_times, exact = in_pairs(ours, stock_and_sync, runs, equal)
    above = [1e6 * (a - b) for a, b in zip(times, stock_times, strict=True)]
    pairs = [1e6 * (a - b) for a, b in zip(*host_s, strict=True)]
    size = max(1, len(pairs) // BATCHES)
    lows = ([quartiles(batch)[0] for batch in _batches(seconds, size)] for seconds in host_s)
    host = [1e6 * (low - other) for low, other in zip(*lows, strict=True)]
    details = {"layer_s": statistics.median(stock_times), "median_of_pairs": statistics.median(pairs)}
    what = f"a layer's host time above stock and its sync, lower quartiles of {size} calls"
    yield row_of("hit-path", what, host, "us", target=Target("<=", 60), exact=exact, details=details)
    yield row_of("hit-path", "the same by the clock, compute and all", above, "us", exact=exact, details=details)


def _batches(seconds: Sequence[float], size: int) -> list[Sequence[float]]:
    """`seconds` in batches of `size`; what is left over is no batch."""
    return [seconds[start : start + size] for start in range(0, len(seconds) - size + 1, size)]


# --- a recorded trace ---------------------------------------------------------------------------------------


def trace(bench: Bench) -> Iterator[Row]:
    """A real model's routing through layers of as many experts, without attention between them."""
    if bench.trace is None:
        raise SkippedError("no --trace FILE.npz was given")
    recorded = np.load(bench.trace)
    experts, count = recorded["experts"][:, :8], int(recorded["num_experts"])
    tokens, layers, top_k = experts.shape
    folder = make_model(
        bench.folder / f"trace-{count}-{top_k}-{layers}",
        *("--experts", str(count), "--top-k", str(top_k), "--layers", str(layers)),
    )
    fill_page_cache(folder)
    stock_model = mlx_lm.load(str(folder))[0]
    stock = list(switch_modules(stock_model).values())
    x = mx.random.normal((1, 1, 512), key=mx.random.key(bench.seed))
    tokens = min(tokens, WARM_UP + bench.steps)
    asked = [[mx.array(experts[t, m][None, None].astype(np.uint32)) for m in range(layers)] for t in range(tokens)]
    mx.eval(x, asked)
    for name, share in SHARES.items():
        bench.say(f"trace: {name}")
        with open_engine(folder, share) as engine, Subject.of(engine).layers() as ours:

            def through(modules: Sequence[nn.Module], token: int) -> mx.array:
                outs = []
                for module, indices in zip(modules, asked[token], strict=True):
                    outs.append(module(x, indices + 0))
                    mx.eval(outs[-1])
                return mx.stack(outs)

            for token in range(min(WARM_UP, tokens // 2)):
                through(ours, token)
            first, before = min(WARM_UP, tokens // 2), engine.stats()
            times, stock_times, exact = in_pairs(
                lambda n: through(ours, first + n),  # noqa: B023
                lambda n: through(stock, first + n),  # noqa: B023
                tokens - first,
                equal,
            )
            after = engine.stats()
        hits, misses = after.hits - before.hits, after.misses - before.misses
        yield row_of(
            "trace",
            f"expert layers to stock, {bench.trace.stem}, {name}",
            [a / b for a, b in zip(times, stock_times, strict=True)],
            exact=exact,
            details={"hit_rate": hits / max(1, hits + misses), "ours_s": statistics.median(times)},
        )
