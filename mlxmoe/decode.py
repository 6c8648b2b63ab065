"""The token loop: prefill in chunks, then token by token. Knows tokens and caches, not text or files.

Legend: T tokens, V vocabulary.

The prompt is divided as mlx-lm divides it (all but its last token in chunks, the last one alone), so that every
matrix product has the same shape and the words are mlx-lm's. Unlike mlx-lm's loop this one is not a step ahead: a
token is handed out before the next forward pass begins, because here a pass can wait for the disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxmoe.errors import EngineClosedError
from mlxmoe.experts.layer import ExpertStream, Passes
from mlxmoe.kv.choose import KVChoice, room
from mlxmoe.sampling import Sampled, Sampler

POOL_TOKENS = (
    256  # decoded between two returns of MLX's freed buffers: a KV cache that grew leaves its old ones there
)

Cache = list[Any]  # mlx-lm's caches, one for each layer


class Decoder:
    """Runs a model's forward passes one at a time, whoever asks. Raises EngineClosedError once it is closed.

    A pass is built and evaluated by one thread, and leaves nothing unevaluated behind: MLX cannot evaluate in one
    thread what another has built. Several generations, each with its own cache, may interleave.
    """

    def __init__(
        self,
        model: nn.Module,
        streams: Collection[ExpertStream],
        passes: Passes,
        *,
        chunk_tokens: int,
        kv_choice: KVChoice | None = None,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self._kv_choice = kv_choice
        self._model: nn.Module | None = model
        self._streams = list(streams)
        self._passes = passes

    @property
    def model(self) -> nn.Module:
        if self._model is None:
            raise EngineClosedError("The engine was closed. Call load() again.")
        return self._model

    def close(self) -> None:
        """Let go of the model once the pass under way is over. May be called twice."""
        with self._passes.one():
            self._model = None
            self._streams = []

    def new_cache(self) -> Cache:
        """An empty cache as the model's definition makes it, or as it was chosen for the engine."""
        return list(make_prompt_cache(self.model)) if self._kv_choice is None else self._kv_choice.caches(self.model)

    def generate(
        self, prompt: Sequence[int], cache: Cache, sampler: Sampler, *, before: Sequence[int] = ()
    ) -> Iterator[Sampled]:
        """Tokens without end after `prompt`, which `cache` has not seen, though it has seen `before`.

        Modifies `cache`. Each token is yielded before the next one's pass, and is not in the cache yet.
        """
        self.prefill(prompt[:-1], cache)
        history = [*before, *prompt]
        while True:
            with self._pass() as model:
                logits = model(mx.array([history[-1:]]), cache=cache)[:, -1, :]
                token, logprob = sampler(logits, history)
                mx.eval(token, logprob, sampler.key, [entry.state for entry in cache])
            sampled = Sampled.of(token, logprob)
            yield sampled
            history.append(sampled.token)
            if len(history) % POOL_TOKENS == 0:
                mx.clear_cache()

    def prefill(self, tokens: Sequence[int], cache: Cache) -> None:
        """Let `cache` see `tokens`, chunk by chunk. Modifies `cache`."""
        for chunk in self._chunks(tokens, cache):
            with self._pass() as model:
                model(mx.array([chunk]), cache=cache)
                mx.eval([entry.state for entry in cache])
            mx.clear_cache()

    def logits(self, tokens: Sequence[int], cache: Cache) -> mx.array:
        """The logits `[T, V]` after each of `tokens`, from the very passes that `generate` makes for a prompt."""
        parts = []
        for chunk in chain(self._chunks(tokens[:-1], cache), [list(tokens[-1:])]):
            with self._pass() as model:
                logits = model(mx.array([chunk]), cache=cache)[0]
                mx.eval(logits, [entry.state for entry in cache])
            parts.append(logits)
        whole = mx.concatenate(parts) if len(parts) > 1 else parts[0]
        mx.eval(whole)
        return whole

    def _chunks(self, tokens: Sequence[int], cache: Cache) -> Iterator[list[int]]:
        """`tokens` in calls that `cache` can take; each must have been made before the next one is asked for."""
        begin = 0
        while begin < len(tokens):
            end = begin + min(self.chunk_tokens, room(cache) or self.chunk_tokens)
            yield list(tokens[begin:end])
            begin = end

    @contextmanager
    def _pass(self) -> Iterator[nn.Module]:
        with self._passes.one():
            for stream in self._streams:  # of a pass that was cut short: nobody will ask for it
                stream.take_pending()
            try:
                yield self.model
            finally:
                mx.eval([stream.take_pending() for stream in self._streams])
