"""The token loop: prefill in chunks, then token by token. Knows tokens and caches, not text or files.

Legend: T tokens, V vocabulary.

The prompt is divided as mlx-lm divides it (all but its last token in chunks, the last one alone), so that every
matrix product has the same shape and the words are mlx-lm's to the bit. Unlike mlx-lm's loop this one is not a
step ahead: a token is handed out before the next forward pass begins, because here a pass can wait for the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxmoe.experts.layer import ExpertStream
from mlxmoe.sampling import Sampled, Sampler

Cache = list[Any]  # mlx-lm's caches, one for each layer


class Decoder:
    """Runs a model's forward passes one at a time, whoever asks.

    A pass is built and evaluated by one thread under one lock, and leaves nothing unevaluated behind: MLX cannot
    evaluate in one thread what another has built. Several generations, each with its own cache, may interleave.

    `check`: called before each pass; it may raise to refuse it.
    """

    def __init__(
        self,
        model: nn.Module,
        streams: Collection[ExpertStream],
        *,
        chunk_tokens: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.lock = threading.RLock()
        self._model = model
        self._streams = list(streams)
        self.check = check

    def new_cache(self) -> Cache:
        """An empty cache as the model's definition makes it."""
        return list(make_prompt_cache(self._model))

    def release(self) -> None:
        """Let go of the model; `check` must refuse every pass from now on."""
        del self._model
        self._streams = []

    def generate(
        self, prompt: Sequence[int], cache: Cache, sampler: Sampler, *, before: Sequence[int] = ()
    ) -> Iterator[Sampled]:
        """Tokens without end after `prompt`, which `cache` has not seen, though it has seen `before`.

        Modifies `cache`. Each token is yielded before the next one's pass, and is not in the cache yet.
        """
        self.prefill(prompt[:-1], cache)
        history = [*before, *prompt]
        while True:
            with self._pass():
                logits = self._forward(history[-1:], cache)[:, -1, :]
                sampled = sampler(logits, history)
                mx.eval([entry.state for entry in cache])
            yield sampled
            history.append(sampled.token)

    def prefill(self, tokens: Sequence[int], cache: Cache) -> None:
        """Let `cache` see `tokens`, chunk by chunk. Modifies `cache`."""
        for chunk in _chunks(tokens, self.chunk_tokens):
            with self._pass():
                self._forward(chunk, cache)
                mx.eval([entry.state for entry in cache])
            mx.clear_cache()

    def logits(self, tokens: Sequence[int], cache: Cache) -> mx.array:
        """The logits `[T, V]` after each of `tokens`, from the very passes that `generate` makes for a prompt."""
        parts = []
        for chunk in (*_chunks(tokens[:-1], self.chunk_tokens), tokens[-1:]):
            with self._pass():
                logits = self._forward(chunk, cache)[0]
                mx.eval(logits, [entry.state for entry in cache])
            parts.append(logits)
        whole = mx.concatenate(parts)
        mx.eval(whole)
        return whole

    def _forward(self, tokens: Sequence[int], cache: Cache) -> mx.array:
        logits: mx.array = self._model(mx.array([tokens]), cache=cache)
        return logits

    @contextmanager
    def _pass(self) -> Iterator[None]:
        with self.lock:
            self.check()
            try:
                yield
            finally:
                for stream in self._streams:
                    stream.settle()


def _chunks(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]
