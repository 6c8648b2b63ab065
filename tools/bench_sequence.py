"""The model and the tokens that benchmarks run: random weights, but tokens whose experts repeat as real text's do.

A random model routes each token at random, so random tokens would hit as rarely as a cache can, and repeated tokens
would hit all or nothing. In the model here the embeddings of neighbouring token ids are alike (make_synthetic.py
--neighbours), so that a walk through the ids changes some experts in each step. Its stride, and how often it goes
back to where it was, are steered while the model itself routes the tokens, until an LRU over a quarter and over half
of the experts hits as often as asked. Deterministic from a seed.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from bench_subject import Subject, num_experts

from mlxmoe.experts.switch import switch_modules

HIT_RATES = (0.75, 0.93)  # aimed at, with a quarter and with half of the experts in slots
WARM_UP = 32  # tokens after which the slots hold what they would in a long text
NEIGHBOURS = 0.9  # of the model that the next two are for
STRIDE, BACK = 4.0, 0.5  # before any steering: token ids of a step, share of steps back
REACH = range(3, 6)  # how many tokens a step back goes
TOLERANCE, ATTEMPTS = 0.02, 4  # of the hit rates; seeds that are tried for it
STEERING = 3  # counted up whenever a sequence would come out differently
GAIN = 4.0  # of the steering


@dataclass(frozen=True)
class TokenSequence:
    """`tokens`: the first WARM_UP are not measured. `hit_rates`: of an LRU, of the tokens behind them."""

    tokens: list[int]
    hit_rates: tuple[float, float]


class LRU:
    """Hits of one layer with `slots`, an expert that is wanted counted once a token."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._held: OrderedDict[int, None] = OrderedDict()

    def hits(self, experts: Sequence[int]) -> int:
        hits = sum(expert in self._held for expert in experts)
        for expert in experts:
            self._held[expert] = None
            self._held.move_to_end(expert)
        while len(self._held) > self._slots:
            self._held.popitem(last=False)
        return hits


def make_model(folder: Path, *options: str) -> Path:
    """The model in `folder`, made by make_synthetic.py (`options`) where it is not there."""
    if not (folder / "config.json").exists():
        tool = Path(__file__).with_name("make_synthetic.py")
        command = [sys.executable, str(tool), str(folder), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"make_synthetic.py failed: {done.stderr.strip()}")
    return folder


def sequence_for(stock: nn.Module, model: Path, vocab: int, count: int, seed: int, folder: Path) -> TokenSequence:
    """WARM_UP and `count` tokens for the model of folder `model`; kept in `folder` for the next run."""
    weights = sorted(model.glob("*.safetensors"))
    state = [
        STEERING,
        str(model.resolve()),
        vocab,
        count,
        seed,
        [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in weights],
    ]
    name = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]
    file = folder / f"sequence-{name}.json"
    if file.exists():
        found = json.loads(file.read_text())
        return TokenSequence(found["tokens"], tuple(found["hit_rates"]))
    made = _steer(stock, vocab, count, random.Random(seed))
    for further in range(1, ATTEMPTS):
        if _off(made) <= 0.9 * TOLERANCE:
            break
        made = min(made, _steer(stock, vocab, count, random.Random(seed + further)), key=_off)
    file.write_text(json.dumps(asdict(made)))
    return made


def _off(made: TokenSequence) -> float:
    """By how much the hit rate that is further off misses what was aimed at."""
    return max(abs(rate - aim) for rate, aim in zip(made.hit_rates, HIT_RATES, strict=True))


def _steer(stock: nn.Module, vocab: int, count: int, rng: random.Random) -> TokenSequence:
    """Walk through the token ids; lengthen steps and go back more or less often as the hit rates ask for it."""
    modules = list(switch_modules(stock).values())
    caches = [[LRU(max(1, int(num_experts(module) * share))) for module in modules] for share in (0.25, 0.5)]
    subject = Subject(stock)
    tokens = [rng.randrange(vocab)]
    hits, wanted = [0.0, 0.0], 0.0
    with recorded_routing(stock) as routing:
        for step in range(WARM_UP + count):
            subject.run(tokens[-1:])
            if step == WARM_UP:
                hits, wanted = [0.0, 0.0], 0.0
            for which, layers in enumerate(caches):
                hits[which] += sum(lru.hits(ids) for lru, ids in zip(layers, routing, strict=True))
            wanted += sum(map(len, routing))
            routing.clear()
            quarter, half = (h / wanted - aim for h, aim in zip(hits, HIT_RATES, strict=True))
            stride = min(vocab / 4, STRIDE * math.exp(GAIN * half))
            back = min(0.8, max(0.2, BACK - GAIN * quarter))
            tokens.append(_next_token(tokens, stride, back, vocab, rng))
    return TokenSequence(tokens[:-1], (hits[0] / wanted, hits[1] / wanted))


def _next_token(tokens: Sequence[int], stride: float, back: float, vocab: int, rng: random.Random) -> int:
    if len(tokens) > max(REACH) and rng.random() < back:
        return tokens[-rng.choice(REACH)]
    return (tokens[-1] + max(1, round(stride * rng.uniform(0.5, 1.5)))) % vocab


@contextmanager
def recorded_routing(stock: nn.Module) -> Iterator[list[list[int]]]:
    """Within this context, each call of a stock module with routed experts adds the ids it was asked for."""
    routing: list[list[int]] = []
    classes = {}
    for path, module in switch_modules(stock).items():
        classes[path] = type(module)
        module.__class__ = _recording(type(module), routing)
    try:
        yield routing
    finally:
        for path, module in switch_modules(stock).items():
            module.__class__ = classes[path]


def _recording(stock_class: Any, routing: list[list[int]]) -> type:
    def call(self: Any, x: mx.array, indices: mx.array) -> Any:
        routing.append(list(dict.fromkeys(indices.flatten().tolist())))  # type: ignore[arg-type]
        return stock_class.__call__(self, x, indices)

    return type(f"Recording{stock_class.__name__}", (stock_class,), {"__call__": call})
