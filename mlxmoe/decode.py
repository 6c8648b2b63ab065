"""The token loop: prefill in chunks, then token by token. Knows tokens and caches, not text or files.

Legend: T tokens, V vocabulary.

The prompt is divided as mlx-lm divides it (all but its last token in chunks, the last one alone), so that every
matrix product has the same shape and the words are mlx-lm's, with its `prefill_step_size` as our `chunk_tokens`.
Where layers stream a token is handed out before the next forward pass begins, because that can wait for the disk.
Where none does, nothing in a pass waits for its results, and the loop is a step ahead as mlx-lm's is: the next pass
is built while MLX computes this one's token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxmoe.errors import EngineClosedError, MemoryPressureError
from mlxmoe.experts.cache import ExpertCache
from mlxmoe.kv.choose import KVChoice, room
from mlxmoe.kv.prefix import Prefixes, PrefixRun
from mlxmoe.kv.state import CacheState, form, put, refuse_misfit, take
from mlxmoe.sampling import Drawn, Sampled, Sampler

# Decoded between two returns of MLX's freed buffers: a KV cache that grew leaves its old ones there.
POOL_TOKENS = 256

# Of a prompt in one pass, where each one's probability is told: logits, log-probabilities and their order are some
# 150 MB for a vocabulary of 150,000.
SCORE_TOKENS = 64

Cache = list[Any]  # mlx-lm's caches, one for each layer


class Upkeep(Protocol):
    """What is seen to between two passes, and what it says of the next."""

    @property
    def chunk_tokens(self) -> int | None:
        """The most tokens of a prefill chunk now; None where nothing bounds it."""

    @property
    def must_finish(self) -> bool:
        """Whether there may be no further pass."""

    def before_pass(self) -> None:
        """Called outside of any pass: the model may be changed."""

    def after_step(self, seconds: float) -> None:
        """For a decode step the caller waited `seconds`."""


class Decoder:
    """Runs a model's forward passes one at a time, whoever asks. Raises EngineClosedError once it is closed.

    A pass is built and evaluated by one thread, and leaves nothing unevaluated behind: MLX cannot evaluate in one
    thread what another has built. Several generations, each with its own cache, may interleave.
    """

    def __init__(
        self,
        model: nn.Module,
        experts: ExpertCache,
        *,
        chunk_tokens: int,
        kv_choice: KVChoice | None = None,
        upkeep: Upkeep | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self._kv_choice = kv_choice
        self._upkeep = upkeep
        self._model: nn.Module | None = model
        self._experts = experts
        experts.guard_calls(model)
        self._prefixes = prefixes
        if prefixes is not None:
            form(self.new_cache())  # raises for a cache class whose state cannot be kept

    @property
    def model(self) -> nn.Module:
        if self._model is None:
            raise EngineClosedError("The engine was closed. Call load() again.")
        return self._model

    def close(self) -> None:
        """Let go of the model once the pass under way is over. May be called twice."""
        with self._experts.passes.one():
            self._model = None

    @property
    def streams(self) -> bool:
        """Whether a pass may have to wait for experts to be read."""
        return bool(self._experts.streams)

    @property
    def must_finish(self) -> bool:
        """Whether replies have to end because memory is short and nothing is left to give back."""
        return self._upkeep is not None and self._upkeep.must_finish

    def new_cache(self) -> Cache:
        """An empty cache as the model's definition makes it, or as it was chosen for the engine."""
        return list(make_prompt_cache(self.model)) if self._kv_choice is None else self._kv_choice.caches(self.model)

    def states(self, cache: Cache) -> list[CacheState]:
        """The states of `cache`, to be saved. Raises SavedStateError for a class that is not known."""
        with self._experts.passes.one():
            return take(cache)

    def refuse_misfit(self, states: Sequence[CacheState]) -> None:
        """Raise SavedStateError if `states`, which may be without arrays, do not fit this model's caches."""
        refuse_misfit(states, self.new_cache())

    def restored_cache(self, states: Sequence[CacheState]) -> Cache:
        """A cache that has seen what `states` say. Raises SavedStateError if they do not fit this model's caches."""
        cache = self.new_cache()
        with self._experts.passes.one():
            put(states, cache)
        return cache

    def reuse(self, tokens: Sequence[int], cache: Cache) -> PrefixRun | None:
        """Let the empty `cache` see what a prefix store has of the prompt `tokens`; None without a store."""
        if self._prefixes is None:
            return None
        with self._pass():
            return self._prefixes.begin(tokens, cache)

    def note_reply(self, run: PrefixRun, tokens: Sequence[int], cache: Cache) -> None:
        """Keep for other prompts that `cache` has seen `tokens` of a reply, where the store keeps such."""
        if run.keeps_replies:
            with self._pass():
                run.note(tokens, cache)

    def generate(
        self, prompt: Sequence[int], cache: Cache, sampler: Sampler, *, most: int | None = None
    ) -> Iterator[Sampled]:
        """Tokens without end after `prompt`, of which `cache` has seen all but the last. Modifies `cache`.

        Each token is yielded before the next one's pass, and is not in the cache yet. With `most`, the tokens that
        will be asked for at most, it may be in there: nobody is to go on from the cache. Then, from the second token
        on, the next one is under way when a token is yielded, as long as no layer streams; never one beyond `most`.
        """
        history, step = list(prompt), None
        for said in itertools.count(1):
            start = time.perf_counter()
            with self._pass(None if step is None else step.token) as model:
                ahead = most is not None and 1 < said < most and self._may_be_ahead(sampler)
                following = None
                if step is None:
                    (step,) = self._step(model, mx.array([history[-1:]]), cache, [(history, sampler)], leave=ahead)
                if ahead:
                    token = step.token.astype(mx.int32).reshape(1, 1)  # as the one that was read out would be
                    (following,) = self._step(model, token, cache, [(history, sampler)], leave=True)
                sampled = step.sampled()
            self._after_step(start)
            sampler.took(sampled.token)
            yield sampled
            step = following
            history.append(sampled.token)
            if len(history) % POOL_TOKENS == 0:
                mx.clear_cache()

    def step(self, texts: Sequence[tuple[Sequence[int], Sampler]], cache: Cache) -> list[Sampled]:
        """One token of each of `texts` in one pass: tokens so far, of which `cache` has seen all but the last.

        Modifies `cache`: where there are several texts, one of a batch, in their order.
        """
        start = time.perf_counter()
        with self._pass() as model:
            last = mx.array([history[-1:] for history, _ in texts])
            sampled = [step.sampled() for step in self._step(model, last, cache, texts, leave=False)]
        self._after_step(start)
        for (_, sampler), one in zip(texts, sampled, strict=True):
            sampler.took(one.token)
        return sampled

    def prefill(self, tokens: Sequence[int], cache: Cache, run: PrefixRun | None = None) -> None:
        """Let `cache` see `tokens`, chunk by chunk. Modifies `cache`. `run`: where what it sees is kept for others.

        Raises MemoryPressureError where memory ran short and nothing is left to give.
        """
        for _ in self.prefill_steps(tokens, cache, run):
            pass

    def prefill_steps(
        self,
        tokens: Sequence[int],
        cache: Cache,
        run: PrefixRun | None = None,
        *,
        most: Callable[[], int | None] = lambda: None,
    ) -> Iterator[int]:
        """`prefill`, a chunk for each number yielded: the tokens that `cache` has seen of `tokens` by then.

        `most`: asked before each chunk for the most tokens that it may have, None for the usual.
        """
        done = 0
        while done < len(tokens):
            with self._pass() as model:
                chunk = tokens[done : done + min(self._chunk_size(cache), most() or len(tokens))]
                model(mx.array([chunk]), cache=cache)
                mx.eval([entry.state for entry in cache])
                if run is not None:
                    run.note(chunk, cache)
            done += len(chunk)
            mx.clear_cache()
            yield done
            self._refuse_to_go_on(done, len(tokens))

    def _refuse_to_go_on(self, done: int, tokens: int) -> None:
        """Raise MemoryPressureError where memory is short and nothing is left to give back."""
        if self.must_finish:
            raise MemoryPressureError(
                f"The machine ran short of memory while the prompt was read ({done} of {tokens} tokens)."
            )

    def score_steps(
        self, tokens: Sequence[int], cache: Cache, sampler: Sampler, scores: list[Sampled]
    ) -> Iterator[int]:
        """Let `cache` see all of `tokens` but the last; each next one's probability is appended to `scores`.

        Yields as `prefill_steps` does. Modifies `cache`. In chunks of at most SCORE_TOKENS, for which the whole
        vocabulary's logits are there at once.
        """
        done, last = 0, len(tokens) - 1
        while done < last:
            with self._pass() as model:
                end = min(done + SCORE_TOKENS, done + self._chunk_size(cache), last)
                logits = model(mx.array([tokens[done:end]]), cache=cache)[0]
                drawn = sampler.score(logits, tokens[done + 1 : end + 1])
                mx.eval(drawn, [entry.state for entry in cache])
            scores += [one.sampled() for one in drawn]
            done = end
            mx.clear_cache()
            yield done
            self._refuse_to_go_on(done, len(tokens))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The turn for work on caches: no pass runs meanwhile."""
        with self._experts.passes.one():
            yield

    def logits(self, tokens: Sequence[int], cache: Cache) -> mx.array:
        """The logits `[T, V]` after each of `tokens`, from the very passes that `generate` makes for a prompt."""
        parts: list[mx.array] = []
        done = 0
        while done < len(tokens):
            with self._pass() as model:
                size = min(self._chunk_size(cache), max(1, len(tokens) - 1 - done))
                logits = model(mx.array([tokens[done : done + size]]), cache=cache)[0]
                mx.eval(logits, [entry.state for entry in cache])
            done += size
            parts.append(logits)
        whole = mx.concatenate(parts) if len(parts) > 1 else parts[0]
        mx.eval(whole)
        return whole

    def _step(
        self,
        model: nn.Module,
        last: mx.array,
        cache: Cache,
        texts: Sequence[tuple[Sequence[int], Sampler]],
        *,
        leave: bool,
    ) -> list[Drawn]:
        """What follows `last [B, 1]` in each text: evaluated, or left to MLX. Modifies `cache`."""
        logits = model(last, cache=cache)[:, -1, :]
        drawn = [sampler(logits[i : i + 1], history) for i, (history, sampler) in enumerate(texts)]
        evaluate = self._experts.passes.leave if leave else mx.eval
        arrays = [array for one in drawn for array in (one.token, one.logprob, *(one.top or ()))]
        evaluate(*arrays, *(sampler.key for _, sampler in texts), *(entry.state for entry in cache))
        return drawn

    def _after_step(self, start: float) -> None:
        if self._upkeep is not None:
            self._upkeep.after_step(time.perf_counter() - start)

    def _may_be_ahead(self, sampler: Sampler) -> bool:
        return self._experts.may_leave and not sampler.looks_back and not self.must_finish

    def _chunk_size(self, cache: Cache) -> int:
        bounds = (None if self._upkeep is None else self._upkeep.chunk_tokens, room(cache))
        return min([self.chunk_tokens, *(bound for bound in bounds if bound is not None)])

    @contextmanager
    def _pass(self, following: mx.array | None = None) -> Iterator[nn.Module]:
        self._experts.passes.refuse_within()
        _ = self.model  # raises once it is closed: there is nothing to see to then
        if self._upkeep is not None:
            self._upkeep.before_pass()
        with self._experts.one_pass(following):
            yield self.model
