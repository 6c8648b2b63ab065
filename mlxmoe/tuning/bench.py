"""Measuring a loaded engine: decode with a context full, and prefill by the size of its chunks. Finds nothing best.

What is decoded is English and code, the help that comes with Python. Each configuration reads on in it: none finds
its experts in memory because the one before read the same, and all have one kind of text, as an easier one would make
its configuration seem the faster. The context before it is filled with the keys and values of a few words, over and
over: attention takes as long over them as over any others, and prefilling 100,000 tokens for each configuration would
take longer than everything else. Caches that cannot be filled so are prefilled.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from mlxmoe.engine import Engine
from mlxmoe.errors import MemoryBudgetError, MemoryPressureError
from mlxmoe.kv.layers import leaves_of
from mlxmoe.memory.guard import MemoryEvent
from mlxmoe.memory.plan import KV_STEP
from mlxmoe.sampling import Drawn, Sampler, SamplingSettings
from mlxmoe.tuning.search import Decoded, Point

WORDS = "In the beginning there was a small village by the sea. Write a program that counts to ten, and explain why"
SEED_TOKENS = 16
SYNCS = 200  # of which the median is taken
WARM_SHARE = 0.5  # of the time: the slots and the page cache settle
LEAST_TOKENS, MOST_TOKENS = 2, 96  # decoded at once


class _OverrunError(Exception):
    """What is measured would take too long."""


class EngineBench:
    """Measures `engine`, whose slots it changes. `events` is told by the engine's guard, from any thread.

    `bytes_from_disk`: what this process has had read from disks so far; None where the system does not tell.
    `give_up_at`: by the clock, when what shows nothing yet is stopped.
    """

    def __init__(
        self,
        engine: Engine,
        events: Sequence[MemoryEvent],
        bytes_from_disk: Callable[[], int | None],
        clock: Callable[[], float] = time.perf_counter,
        give_up_at: float = math.inf,
    ) -> None:
        self._engine = engine
        self._events = events
        self._bytes_from_disk = bytes_from_disk
        self._clock = clock
        self._give_up_at = give_up_at
        ids = list(engine.tokenizer.encode(WORDS))
        self._words = (ids * (SEED_TOKENS // max(1, len(ids)) + 1))[:SEED_TOKENS]
        self._seed: list[Any] | None = None  # the caches' states after the words
        self._text = _Text(lambda piece: engine.tokenizer.encode(piece, add_special_tokens=False))

    def sync(self) -> float:
        """Seconds that a host sync takes: to hand over almost nothing to compute, and to wait for it."""
        nothing, took = mx.zeros((8,)), list[float]()
        for _ in range(SYNCS):
            start = self._clock()
            mx.eval(nothing + 1)
            took.append(self._clock() - start)
        return median(took)

    def seed(self) -> float:
        """Prefill the words that contexts are filled with; the seconds that a token of them took."""
        decoder, start = self._engine.decoder, self._clock()
        cache = decoder.new_cache()
        decoder.prefill(self._words, cache)
        self._seed = [leaf.state for leaf in leaves_of(cache)]
        return (self._clock() - start) / len(self._words)

    def prefill(self, chunk_tokens: int) -> float:
        """Seconds that a prompt of one chunk takes, the memory as it is. Raises MemoryPressureError."""
        tokens = self._text.take(chunk_tokens)
        decoder, before = self._engine.decoder, len(self._events)
        start = self._clock()
        decoder.prefill(tokens, decoder.new_cache())
        seconds = self._clock() - start
        if found := pressed(self._events[before:]):
            raise MemoryPressureError(found)
        return seconds

    def decode(self, point: Point, seconds: float) -> Decoded:
        """Decode with the context of `point` full, for about `seconds`, and its expert budget.

        What brings memory pressure, or would show nothing in time, is stopped: what was seen of it says so.
        """
        before = len(self._events)
        start = self._clock()
        mx.clear_cache()  # the last context's cache: it is not to be in the way of larger banks
        try:
            if point.plan.expert_bytes:
                self._engine.resize(point.plan.bank_bytes)
            after = tokens_after(point.context)
            return self._steps(self._filled(point.context - after), after, start, seconds, before)
        except (MemoryBudgetError, MemoryPressureError) as error:
            mx.clear_cache()
            return Decoded(pressure=str(error))
        except _OverrunError as error:
            mx.clear_cache()
            return Decoded(overrun=str(error))

    def _steps(self, cache: list[Any], most: int, start: float, seconds: float, before: int) -> Decoded:
        """`most`: tokens, with those that warm up."""
        decoder = self._engine.decoder
        stepping = decoder.generate(self._text.take(1), cache, _Reading(self._text))
        warm_until = self._clock() + WARM_SHARE * max(0.0, seconds - (self._clock() - start))
        for _ in range(max(1, most // 2)):
            next(stepping)
            self._refuse_overrun("decoding with it full")
            if self._clock() >= warm_until:
                break
        stats, disk, steps, found = self._engine.stats(), self._bytes_from_disk(), list[float](), None
        while len(steps) < max(LEAST_TOKENS, most // 2) and found is None:
            begun = self._clock()
            next(stepping)
            steps.append(self._clock() - begun)
            if len(steps) < LEAST_TOKENS:
                self._refuse_overrun("decoding with it full")
            found = pressed(self._events[before:])
            if self._clock() - start >= seconds and len(steps) >= LEAST_TOKENS:
                break
        after, disk_after = self._engine.stats(), self._bytes_from_disk()
        read = after.bytes_read + after.early_bytes - stats.bytes_read - stats.early_bytes
        return Decoded(
            steps_s=tuple(steps),
            hits=after.hits - stats.hits,
            misses=after.misses - stats.misses,
            read_bytes=read,
            disk_bytes=None if disk is None or disk_after is None else min(read, disk_after - disk),
            pressure=found,
        )

    def _filled(self, tokens: int) -> list[Any]:
        """The model's caches after `tokens`."""
        decoder = self._engine.decoder
        if self._seed is None:
            self.seed()
        assert self._seed is not None, "seed() has just been called"
        cache = decoder.new_cache()
        leaves = leaves_of(cache)
        if all(type(leaf) in (KVCache, QuantizedKVCache, RotatingKVCache, ArraysCache) for leaf in leaves):
            for leaf, state in zip(leaves, self._seed, strict=True):
                leaf.state = _stretched(leaf, state, len(self._words), tokens)
                mx.eval(leaf.state)
                self._refuse_overrun("filling its KV cache")
        else:
            for _ in decoder.prefill_steps(self._text.take(tokens), cache):
                self._refuse_overrun("prefilling it")
        return cache

    def _refuse_overrun(self, what: str) -> None:
        if self._clock() >= self._give_up_at:
            raise _OverrunError(f"{what} took more than there is time for")


def tokens_after(context: int) -> int:
    """What is decoded at the end of a full context, at most."""
    return max(1, min(MOST_TOKENS, context // 4))


def pressed(events: Sequence[MemoryEvent]) -> str | None:
    """What the guard noticed or did because memory was short; None where nothing."""
    told = [event for event in events if event.action in ("shrink", "restrict", "finish")]
    told += [event for event in events if event.action == "pressure" and event.pressure != "normal"]
    return told[0].text if told else None


class _Text:
    """Tokens without end: the help on Python's statements and types, some 100,000 of them before it begins again."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        self._tokens = self._read()

    def take(self, count: int) -> list[int]:
        return list(islice(self._tokens, count))

    def _read(self) -> Iterator[int]:
        while True:
            for topic in topics.values():
                for piece in re.findall(r"(?s).{1,400}(?:\s|$)", topic):  # transformers warns of longer ones
                    yield from self._encode(piece)


class _Reading(Sampler):
    """Draws what a text says next, whatever the model would: each token takes the work of any other."""

    def __init__(self, text: _Text) -> None:
        super().__init__(SamplingSettings(seed=0))
        self._text = text

    def __call__(self, logits: mx.array, history: Sequence[int]) -> Drawn:
        drawn = super().__call__(logits, history)
        return drawn._replace(token=mx.array(self._text.take(1)[0], dtype=drawn.token.dtype))


def _stretched(cache: Any, state: Any, seen: int, tokens: int) -> Any:
    """The state of an empty `cache` after `tokens`, made of one after `seen` by repeating its rows."""
    if type(cache) is ArraysCache:
        return tree_map(lambda value: value, state)  # of a fixed size, whatever it has seen
    keys, values, _, *rest = state
    rows = -(-(tokens + MOST_TOKENS) // KV_STEP) * KV_STEP  # as the cache would have made room
    if type(cache) is RotatingKVCache:
        rows = min(tokens, cache.max_size)
        rest = [cache.keep, cache.max_size, rows]

    def repeat(array: mx.array) -> mx.array:
        return mx.take(array, mx.arange(rows) % seen, axis=-2)

    return (tree_map(repeat, keys), tree_map(repeat, values), tokens, *rest)
