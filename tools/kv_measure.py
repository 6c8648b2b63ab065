"""What a window and quantised rows cost, measured on held-out text: `kv_measure.py steps|bits|curve|stream`.

`steps`: how far logits differ between prefill steps, mlx-lm's RotatingKVCache beside ours. `bits`: perplexity with
16, 8 and 4 bits. `curve`: perplexity over the position in the text, as a table and a PNG. `stream`: a long text with
its memory. The text is what the demo model never saw (see demo_text.py; it wants the Debian packages named there).

Each prints a table and then one line of JSON. Knows nothing of engines: it measures caches.

Axes: S streams of text, T tokens of a call, V vocabulary.
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from demo_text import EOT_ID, read_texts
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from mlxmoe.hub import demo_folder
from mlxmoe.kv.choose import choose
from mlxmoe.kv.settings import KVSettings

HELD_OUT = 0.02  # of the chapters, as train_demo.py has it
Caches = Callable[[], list[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=demo_folder(), help="folder; the demo model by default")
    commands = parser.add_subparsers(required=True)
    steps = commands.add_parser("steps")
    steps.add_argument("--tokens", type=int, default=600)
    steps.add_argument("--window", type=int, default=128)
    steps.set_defaults(run=measure_steps)
    bits = commands.add_parser("bits")
    bits.add_argument("--length", type=int, default=256)
    bits.add_argument("--limit", type=int, default=20_000, help="tokens of text")
    bits.add_argument("--window", type=int, default=None)
    bits.set_defaults(run=measure_bits)
    curve = commands.add_parser("curve")
    curve.add_argument("--window", type=int, default=128)
    curve.add_argument("--streams", type=int, default=4)
    curve.add_argument("--png", type=Path, default=None)
    curve.set_defaults(run=measure_curve)
    stream = commands.add_parser("stream")
    stream.add_argument("--tokens", type=int, default=100_000)
    stream.add_argument("--window", type=int, default=512)
    stream.add_argument("--kv-bits", type=int, default=None)
    stream.set_defaults(run=measure_stream)
    arguments = parser.parse_args()
    model, config = load_model(arguments.model)
    arguments.run(model, config["max_position_embeddings"], arguments)


def held_out_tokens(folder: Path) -> np.ndarray:
    """The held-out chapters of both books one after the other, each behind the token that ends a text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chapters = [chapter for text in read_texts(0, HELD_OUT) for chapter in text.held_out]
    ids = [[EOT_ID, *encoding.ids] for encoding in tokenizer.encode_batch(chapters, add_special_tokens=False)]
    return np.concatenate([np.array(chapter) for chapter in ids])


def ours(model: nn.Module, trained: int, **settings: Any) -> Caches:
    """Makes caches as an engine would."""
    choice = choose(model, KVSettings(**settings), trained)
    return lambda: choice.caches(model)


def rotating(model: nn.Module, window: int, keep: int = 4) -> Caches:
    return lambda: [RotatingKVCache(max_size=window, keep=keep) for _ in model.layers]


def costs(model: nn.Module, caches: Caches, streams: np.ndarray, step: int, batch: int = 16) -> np.ndarray:
    """`[S, T]` nats that each next token of `streams [S, T + 1]` costs, prefilled `step` tokens at a time."""
    rows = []
    for part in np.split(streams, range(batch, len(streams), batch)):
        cache, pieces = caches(), []
        for begin in range(0, part.shape[1] - 1, step):
            piece = part[:, begin : begin + step + 1]
            logits = model(mx.array(piece[:, :-1]), cache=cache)
            nats = nn.losses.cross_entropy(logits, mx.array(piece[:, 1:]))
            mx.eval(nats, [entry.state for entry in cache])
            pieces.append(np.array(nats, dtype=np.float64))
            mx.clear_cache()
        rows.append(np.concatenate(pieces, axis=1))
    return np.concatenate(rows)


# --- steps ------------------------------------------------------------------------------------------------


def measure_steps(model: nn.Module, trained: int, arguments: argparse.Namespace) -> None:
    """The largest difference between the logits of different prefill steps."""
    tokens = held_out_tokens(arguments.model)[: arguments.tokens].tolist()
    window, found = arguments.window, {}
    kinds = {
        "RotatingKVCache(keep=4)": rotating(model, window),
        "SlidingWindowKVCache": ours(model, trained, window=window),
    }
    for name, caches in kinds.items():
        runs = {step: step_logits(model, caches(), tokens, step) for step in (5, 16, 64, 2048)}
        base = runs[2048]
        found[name] = {step: mx.abs(logits - base).max().item() for step, logits in runs.items()}
    print(f"| largest logit difference to a step of 2048 | {' | '.join(str(s) for s in (5, 16, 64, 2048))} |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, differences in found.items():
        print(f"| {name} | {' | '.join(f'{d:.2g}' for d in differences.values())} |")
    print(json.dumps({"window": window, "tokens": len(tokens), "largest_difference": found}))


def step_logits(model: nn.Module, cache: list[Any], tokens: Sequence[int], step: int) -> mx.array:
    parts = []
    for begin in range(0, len(tokens), step):
        parts.append(model(mx.array([tokens[begin : begin + step]]), cache=cache)[0])
        mx.eval(parts, [entry.state for entry in cache])
    return mx.concatenate(parts)


# --- bits -------------------------------------------------------------------------------------------------


def measure_bits(model: nn.Module, trained: int, arguments: argparse.Namespace) -> None:
    """Perplexity of the held-out text in texts of `length` tokens, with rows in 16, 8 and 4 bits."""
    tokens = held_out_tokens(arguments.model)[: arguments.limit]
    length = arguments.length
    count = (len(tokens) - 1) // length
    streams = np.stack([tokens[i * length : (i + 1) * length + 1] for i in range(count)])
    found: dict[int, float] = {}
    print("| bits | perplexity | of unquantised |\n| ---: | ---: | ---: |")
    for bits in (None, 8, 4):
        nats = costs(model, ours(model, trained, kv_bits=bits, window=arguments.window), streams, length // 2)
        found[bits or 16] = math.exp(nats.mean())
        print(f"| {bits or 16} | {found[bits or 16]:.4f} | {found[bits or 16] / found[16]:.4f} |", flush=True)
    print(json.dumps({"model": arguments.model.name, "tokens": int(streams.size), "perplexity": found}))


# --- curve ------------------------------------------------------------------------------------------------


def measure_curve(model: nn.Module, trained: int, arguments: argparse.Namespace) -> None:
    """What text costs by its position, relative to the same text at the beginning of a stream.

    A ring of 16 trained contexts of text is read from several places on, once round and one context more: so what
    stands at the beginning of a stream and 16 contexts later is the same text, and what differs is the position.
    """
    window, around = arguments.window, 16
    ring = held_out_tokens(arguments.model)[: trained * around]
    alone = np.append(ring, ring[0])
    parts = np.stack([alone[i * trained : (i + 1) * trained + 1] for i in range(around)])
    base = costs(model, lambda: [KVCache() for _ in model.layers], parts, trained).mean(axis=1)  # of each part
    apart = around // arguments.streams
    firsts = range(apart // 2, around, apart)  # the ring's seam is at no stream's beginning
    streams = np.stack([np.resize(np.roll(ring, -first * trained), len(ring) + trained + 1) for first in firsts])
    text = np.array([[(first + place) % around for place in range(around + 1)] for first in firsts])
    found = {}
    for name, caches in curves(model, trained, window).items():
        nats = costs(model, caches, streams, trained // 2).reshape(len(streams), -1, trained).mean(axis=2)
        found[name] = np.exp((nats - base[text]).mean(axis=0)).tolist()
        inside, beyond = math.exp(nats[:, 0].mean()), math.exp(nats[:, around].mean())
        print(
            f"{name}: perplexity {inside:.2f} inside, {beyond:.2f} at 16 contexts: {beyond / inside:.4f}", flush=True
        )
    print(f"\n| tokens | {' | '.join(found)} |\n| ---: |{' ---: |' * len(found)}")
    for place in range(around + 1):
        row = " | ".join(f"{curve[place]:.4f}" for curve in found.values())
        print(f"| {place * trained} to {(place + 1) * trained} | {row} |")
    if arguments.png is not None:
        draw(arguments.png, found, trained, window)
    print(json.dumps({"window": window, "trained": trained, "relative_perplexity": found}))


def curves(model: nn.Module, trained: int, window: int) -> dict[str, Caches]:
    """What is compared, by the names in table and picture."""
    return {
        "window": ours(model, trained, window=window),
        "window, 8 bits": ours(model, trained, window=window, kv_bits=8),
        "window, 4 bits": ours(model, trained, window=window, kv_bits=4),
        "positions that count on": ours(model, 2**30, window=window),
        "mlx-lm's RotatingKVCache(keep=4)": rotating(model, window),
    }


def draw(file: Path, found: dict[str, list[float]], trained: int, window: int) -> None:
    """The curves as a PNG; wants the extra `plot`."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for (name, curve), style in zip(found.items(), ("-", "--", ":", "-", "-"), strict=True):
        axes.plot([(part + 0.5) * trained for part in range(len(curve))], curve, style, label=name)
    axes.axvline(trained, color="grey", linewidth=0.8)
    axes.set(
        xlabel=f"position in the text, tokens (trained: {trained}, window: {window})",
        ylabel="perplexity, 1: the same text at the beginning",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


# --- stream -----------------------------------------------------------------------------------------------


def measure_stream(model: nn.Module, trained: int, arguments: argparse.Namespace) -> None:
    """A text of many tokens in calls of every kind: memory and perplexity for each tenth of it."""
    tokens = np.resize(held_out_tokens(arguments.model), arguments.tokens + 1)
    cache = ours(model, trained, window=arguments.window, kv_bits=arguments.kv_bits)()
    rng, at, tenth = random.Random(0), 0, arguments.tokens // 10
    rows: list[dict[str, Any]] = []
    nats: list[float] = []
    print("| tokens seen | cache bytes | MLX active bytes | MLX peak bytes | perplexity |\n|" + " ---: |" * 5)
    mx.reset_peak_memory()
    while at < arguments.tokens:
        step = min(rng.choice((1, 1, 7, 64, 256)), tenth * (len(rows) + 1) - at)
        logits = model(mx.array(tokens[None, at : at + step]), cache=cache)
        cost = nn.losses.cross_entropy(logits, mx.array(tokens[None, at + 1 : at + step + 1]))
        mx.eval(cost, [entry.state for entry in cache])
        nats += np.array(cost[0]).tolist()
        at += step
        if at % tenth == 0:
            del logits, cost
            mx.clear_cache()
            row = {
                "tokens": at,
                "cache_bytes": sum(entry.nbytes for entry in cache),
                "active_bytes": mx.get_active_memory(),
                "peak_bytes": mx.get_peak_memory(),
                "perplexity": math.exp(np.mean(nats)),
            }
            rows.append(row)
            nats = []
            print(f"| {' | '.join(str(round(v, 3)) for v in row.values())} |", flush=True)
    print(json.dumps({"window": arguments.window, "kv_bits": arguments.kv_bits, "rows": rows}))


if __name__ == "__main__":
    main()
