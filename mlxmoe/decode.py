"""The token loop: prefill in chunks, then token by token. Knows tokens and caches, not text or files.

Legend: T tokens, V vocabulary.

The prompt is divided as mlx-lm divides it (all but its last token in chunks, the last one alone), so that every
matrix product has the same shape and the words are mlx-lm's. Unlike mlx-lm's loop this one is not a step ahead: a
token is handed out before the next forward pass begins, because here a pass can wait for the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxmoe.errors import EngineClosedError
from mlxmoe.experts.cache import ExpertCache
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

    def __init__(self, model: nn.Module, experts: ExpertCache, *, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self._model: nn.Module | None = model
        self._experts = experts

    @property
    def model(self) -> nn.Module:
        if self._model is None:
            raise EngineClosedError("The engine was closed. Call load() again.")
        return self._model

    def close(self) -> None:
        """Let go of the model once the pass under way is over. May be called twice."""
        with self._experts.passes.one():
            self._model = None

    def new_cache(self) -> Cache:
        """An empty cache as the model's definition makes it."""
        return list(make_prompt_cache(self.model))

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
        for chunk in _chunks(tokens, self.chunk_tokens):
            with self._pass() as model:
                model(mx.array([chunk]), cache=cache)
                mx.eval([entry.state for entry in cache])
            mx.clear_cache()

    def logits(self, tokens: Sequence[int], cache: Cache) -> mx.array:
        """The logits `[T, V]` after each of `tokens`, from the very passes that `generate` makes for a prompt."""
        parts = []
        for chunk in (*_chunks(tokens[:-1], self.chunk_tokens), tokens[-1:]):
            with self._pass() as model:
                logits = model(mx.array([chunk]), cache=cache)[0]
                mx.eval(logits, [entry.state for entry in cache])
            parts.append(logits)
        whole = mx.concatenate(parts) if len(parts) > 1 else parts[0]
        mx.eval(whole)
        return whole

    @contextmanager
    def _pass(self) -> Iterator[nn.Module]:
        with self._experts.one_pass():
            yield self.model


def _chunks(tokens: Sequence[int], size: int) -> list[list[int]]:
    return [list(tokens[start : start + size]) for start in range(0, len(tokens), size)]
