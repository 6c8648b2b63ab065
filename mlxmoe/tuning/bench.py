"""Measuring a loaded engine: decode with a context full, and prefill by the size of its chunks. Finds nothing best.

What is decoded is English and code, the help that comes with Python. Each configuration reads on in it: none finds
its experts in memory because the one before read the same, and all have one kind of text, as an easier one would make
its configuration seem the faster. The context before it is filled with the keys and values of a few words, over and
over: attention takes as long over them as over any others, and prefilling 100,000 tokens for each configuration would
take longer than everything else. Caches that cannot be filled so are prefilled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
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
from mlxmoe.sampling import Sampled
from mlxmoe.tuning.pace import PASSES, Pace
from mlxmoe.tuning.search import Decoded, Point
from mlxmoe.tuning.text import Reading, Text

WORDS = "In the beginning there was a small village by the sea. Write a program that counts to ten, and explain why"
SEED_TOKENS = 16
SYNCS = 200  # of which the median is taken
WARM_SHARE = 0.5  # of the time: the slots and the page cache settle
TRIAL_TOKENS = 2048  # of the first context that is tried out: attention over them is little beside a model's weights
TRIAL_SHARE = 0.2  # of the time that is left: what trying out a longer one may take
LEAST_TOKENS, MOST_TOKENS = 2, 96  # decoded at once


class _OverrunError(Exception):
    """What is measured would take longer than there is time for."""


class EngineBench:
    """Measures `engine`, whose slots it changes. `events` is told by the engine's guard, from any thread.

    `bytes_from_disk`: what this process has had read from disks so far; None where the system does not tell.
    `deadline`: by the clock, until when everything is to be over: nothing is begun that would take longer.
    `read_bytes_per_s`: of the model's files, None where that is not known: what slots that are added are read with.
    """

    def __init__(
        self,
        engine: Engine,
        events: Sequence[MemoryEvent],
        bytes_from_disk: Callable[[], int | None],
        clock: Callable[[], float] = time.perf_counter,
        deadline: float = math.inf,
        read_bytes_per_s: float | None = None,
    ) -> None:
        self._engine = engine
        self._events = events
        self._bytes_from_disk = bytes_from_disk
        self._clock = clock
        self._deadline = deadline
        self._read_bytes_per_s = read_bytes_per_s
        self._pace = Pace()
        ids = list(engine.tokenizer.encode(WORDS))
        self._words = (ids * (SEED_TOKENS // max(1, len(ids)) + 1))[:SEED_TOKENS]
        self._seed: list[Any] | None = None  # the caches' states after the words
        self._text = Text(lambda piece: engine.tokenizer.encode(piece, add_special_tokens=False))

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

        What brings memory pressure is stopped, and what would not be over by the deadline is not begun, or stopped
        where that turns out on the way: what was seen of it says so.
        """
        before = len(self._events)
        start = self._clock()
        mx.clear_cache()  # the last context's cache: it is not to be in the way of larger banks
        try:
            if point.plan.expert_bytes:
                self._resize(point.plan.bank_bytes)
            after = tokens_after(point.context)
            self._refuse_what_takes_too_long(point.context - after)
            return self._measured(point.context - after, after, start, seconds, before)
        except (MemoryBudgetError, MemoryPressureError) as error:
            mx.clear_cache()
            return Decoded(pressure=str(error))
        except _OverrunError as error:
            mx.clear_cache()
            return Decoded(overrun=str(error))

    def _resize(self, bank_bytes: int) -> None:
        if self._read_bytes_per_s is not None:
            more = max(0, bank_bytes - self._engine.plan.bank_bytes)
            self._refuse_overrun("reading its experts may take", more / self._read_bytes_per_s)
        self._engine.resize(bank_bytes)

    def _refuse_what_takes_too_long(self, tokens: int) -> None:
        """Raise _OverrunError where a context of `tokens` cannot be filled and decoded with before the deadline.

        Where what was seen says too little of that many, shorter ones are tried: each takes some of the time at most.
        """
        if not self._pace.longest:
            self._try_out(min(tokens, TRIAL_TOKENS if _repeatable(self._engine.decoder.new_cache()) else SEED_TOKENS))
        while self._pace.needed_s(tokens) > self._left_s:
            reached = min(tokens, self._pace.reach(TRIAL_SHARE * self._left_s))
            if reached <= self._pace.longest:
                break
            self._try_out(reached)
        self._refuse_overrun("filling it and decoding with it full may take", self._pace.needed_s(tokens))

    def _try_out(self, tokens: int) -> None:
        """See how long a context of `tokens` takes."""
        start = self._clock()
        cache = self._filled(tokens)
        fill_s = self._clock() - start
        stepping = self._engine.decoder.generate(self._text.take(1), cache, Reading(self._text))
        passes = list[float]()
        for more in reversed(range(PASSES)):
            passes.append(self._timed(stepping))
            self._refuse_overrun("trying out a shorter one may take", more * min(passes))
        self._pace.note(tokens, fill_s, min(passes[1:]))
        mx.clear_cache()

    def _measured(self, tokens: int, most: int, start: float, seconds: float, before: int) -> Decoded:
        """Decode after `tokens` at most `most` more, with those that warm up."""
        filling = self._clock()
        cache = self._filled(tokens)
        fill_s = self._clock() - filling
        stepping = self._engine.decoder.generate(self._text.take(1), cache, Reading(self._text))
        self._warm_up(stepping, max(1, most // 2), WARM_SHARE * max(0.0, seconds - (self._clock() - start)))
        stats, disk, steps, found = self._engine.stats(), self._bytes_from_disk(), list[float](), None
        while len(steps) < max(LEAST_TOKENS, most // 2) and found is None:
            steps.append(self._timed(stepping))
            found = pressed(self._events[before:])
            enough = self._clock() - start >= seconds and len(steps) >= LEAST_TOKENS
            if enough or steps[-1] > self._left_s:
                break
        self._pace.note(tokens, fill_s, median(steps))
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

    def _warm_up(self, stepping: Iterator[Sampled], most: int, seconds: float) -> None:
        """For `seconds`, `most` tokens at most: the slots and the page cache settle. Another token fits after it."""
        until = self._clock() + seconds
        for _ in range(most):
            self._refuse_overrun("a token more may take", self._timed(stepping))
            if self._clock() >= until:
                return

    def _timed(self, stepping: Iterator[Sampled]) -> float:
        start = self._clock()
        next(stepping)
        return self._clock() - start

    def _filled(self, tokens: int) -> list[Any]:
        """The model's caches after `tokens`."""
        decoder = self._engine.decoder
        if self._seed is None:
            self.seed()
        assert self._seed is not None, "seed() has just been called"
        cache = decoder.new_cache()
        leaves = leaves_of(cache)
        start = self._clock()
        if _repeatable(cache):
            for done, (leaf, state) in enumerate(zip(leaves, self._seed, strict=True)):
                each_s = (self._clock() - start) / max(1, done)
                self._refuse_overrun("filling its KV cache takes", (len(leaves) - done) * each_s)
                leaf.state = _stretched(leaf, state, len(self._words), tokens)
                mx.eval(leaf.state)
        else:
            done = 0
            for seen in decoder.prefill_steps(self._text.take(tokens), cache):
                each_s, start = (self._clock() - start) / (seen - done), self._clock()
                done = seen
                self._refuse_overrun("prefilling it takes", (tokens - done) * each_s)
        return cache

    @property
    def _left_s(self) -> float:
        return self._deadline - self._clock()

    def _refuse_overrun(self, what: str, needed_s: float) -> None:
        """Raise _OverrunError unless there are `needed_s` seconds left."""
        if needed_s > (left := max(0.0, self._left_s)):
            raise _OverrunError(f"{what} {needed_s:.1f} s, and {left:.1f} s were left")


def tokens_after(context: int) -> int:
    """What is decoded at the end of a full context, at most."""
    return max(1, min(MOST_TOKENS, context // 4))


def pressed(events: Sequence[MemoryEvent]) -> str | None:
    """What the guard noticed or did because memory was short; None where nothing."""
    told = [event for event in events if event.action in ("shrink", "restrict", "finish")]
    told += [event for event in events if event.action == "pressure" and event.pressure != "normal"]
    return told[0].text if told else None


def _repeatable(cache: list[Any]) -> bool:
    """Whether the model's caches can be filled by repeating what they hold."""
    return all(type(leaf) in (KVCache, QuantizedKVCache, RotatingKVCache, ArraysCache) for leaf in leaves_of(cache))


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
