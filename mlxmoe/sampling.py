"""From logits to a token: validated settings and a sampler with a random state of its own. Knows no text.

Legend: V vocabulary.

The filters are mlx-lm's. The random key belongs to one generation, so that a seed gives the same tokens whatever
else runs in between.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from mlxmoe.errors import MlxMoeError, SamplingError

REPETITION_TOKENS = 20  # how far back the repetition penalty looks: mlx-lm's default
GREEDY_BELOW = 1e-6  # a temperature so small overflows float32 when divided by


MOST_TOP_LOGPROBS = 20  # as many as OpenAI's API tells


class Sampled(NamedTuple):
    """A token and its log-probability before temperature and filters (after penalties, biases and constraints).

    `top`: the most probable tokens then and theirs, the first one first, as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Drawn(NamedTuple):
    """A token before it is evaluated: `token []`, its `logprob []`, and ids and log-probabilities `top [2][n]`."""

    token: mx.array
    logprob: mx.array
    top: tuple[mx.array, mx.array] | None

    def sampled(self) -> Sampled:
        """From the evaluated arrays."""
        top: tuple[tuple[int, float], ...] = ()
        if self.top is not None:
            pairs = zip(*(cast(list[float], part.tolist()) for part in self.top), strict=True)
            top = tuple((int(token), logprob) for token, logprob in sorted(pairs, key=lambda pair: -pair[1]))
        return Sampled(cast(int, self.token.item()), cast(float, self.logprob.item()), top)


class Constraint(Protocol):
    """What a reply may say next: a grammar's state, moved by each token of the reply. Raises nothing: texts that are
    drawn for in the same pass are none of its business."""

    @property
    def failed(self) -> MlxMoeError | None:
        """Why the reply cannot go on: what was drawn since is of no use. None while it can."""

    def allowed(self) -> mx.array | None:
        """`[V]`, true for each token that may come next; None while anything may."""

    def took(self, token: int) -> None:
        """`token` has been drawn."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How tokens are chosen. Raises SamplingError for a value outside its range.

    `temperature`: 0 is greedy. `top_p`: in (0, 1], 1 is off. `top_k`: 0 is off. `min_p`: in [0, 1], 0 is off.
    `repetition_penalty`: from 0.01 to 100, 1 or None is off; it looks back 20 tokens, the prompt's included.
    `presence_penalty`, `frequency_penalty`: from -2 to 2, taken off the logit of each token that the reply has said,
    once or as many times as it has said it. `logit_bias`: for token ids, from -100 to 100, added to their logits.
    `seed`: the same seed gives the same text; None takes a new one. `top_logprobs`: how many of the most probable
    tokens to tell beside each, at most 20.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        _demand(
            _number(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "a number from 0",
        )
        _demand(_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _demand(_whole(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "a whole number, 0 for off")
        _demand(_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        penalty = self.repetition_penalty
        fits = penalty is None or (_number(penalty) and 0.01 <= penalty <= 100)
        _demand(fits, "repetition_penalty", penalty, "from 0.01 to 100, 1 for off")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _demand(_number(value) and -2 <= value <= 2, name, value, "from -2 to 2, 0 for off")
        bias = self.logit_bias or {}
        biased = isinstance(bias, Mapping) and all(
            _whole(token) and token >= 0 and _number(value) and -100 <= value <= 100 for token, value in bias.items()
        )
        _demand(biased, "logit_bias", bias, "token ids with numbers from -100 to 100")
        top = self.top_logprobs
        _demand(_whole(top) and 0 <= top <= MOST_TOP_LOGPROBS, "top_logprobs", top, f"from 0 to {MOST_TOP_LOGPROBS}")
        seed = self.seed
        _demand(seed is None or (_whole(seed) and 0 <= seed < 2**64), "seed", seed, "whole, from 0 to 2**64 - 1")

    def refuse_beyond(self, vocab: int) -> None:
        """Raise SamplingError for a bias on what is no token of a model with `vocab` of them."""
        beyond = [token for token in self.logit_bias or {} if token >= vocab]
        if beyond:
            raise SamplingError(f"logit_bias names token {beyond[0]}: this model's ids run from 0 to {vocab - 1}.")


class Sampler:
    """Draws the tokens of one generation. `key`: its random state, to be evaluated with each token.

    `constraint`: what may be drawn, if not everything; the sampler moves it on.
    """

    def __init__(self, settings: SamplingSettings, constraint: Constraint | None = None) -> None:
        self._settings = settings
        seed = secrets.randbits(64) if settings.seed is None else settings.seed
        self.key = mx.random.key(seed)
        mx.eval(self.key)
        self._constraint = constraint
        self._processors = make_logits_processors(
            repetition_penalty=settings.repetition_penalty, repetition_context_size=REPETITION_TOKENS
        )
        self._said: Counter[int] = Counter()

    @property
    def looks_back(self) -> bool:
        """Whether a token depends on those before it in another way than by the logits."""
        settings = self._settings
        penalties = settings.presence_penalty or settings.frequency_penalty
        return bool(self._processors or penalties or self._constraint is not None)

    def __call__(self, logits: mx.array, history: Sequence[int]) -> Drawn:
        """From `logits [1, V]`; nothing is evaluated, nor is `key` then.

        `history`: all tokens so far, the prompt's included.
        """
        if self._processors and history:
            logits = mx.array(logits)  # mlx-lm's processors write into what they are given
            recent = mx.array(list(history[-REPETITION_TOKENS:]))
            for process in self._processors:
                logits = process(recent, logits)
        logits = self._constrained(self._shifted(logits))
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        token = self._draw(logprobs)
        return Drawn(token[0], mx.take(logprobs[0], token[0]), self._top(logprobs[0]))

    @property
    def failed(self) -> MlxMoeError | None:
        """Why what was drawn last is of no use; None where it is."""
        return None if self._constraint is None else self._constraint.failed

    def score(self, logits: mx.array, tokens: Sequence[int]) -> list[Drawn]:
        """What each of `tokens` would have been drawn with: from `logits [T, V]`, not evaluated. Draws nothing."""
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return [
            Drawn(mx.array(token), row[token], self._top(row)) for token, row in zip(tokens, logprobs, strict=True)
        ]

    def took(self, token: int) -> None:
        """`token`, which was drawn here, is part of the reply."""
        if self._settings.presence_penalty or self._settings.frequency_penalty:
            self._said[token] += 1
        if self._constraint is not None:
            self._constraint.took(token)

    def _shifted(self, logits: mx.array) -> mx.array:
        settings = self._settings
        added = dict(settings.logit_bias or {})
        for token, count in self._said.items():
            penalty = settings.presence_penalty + count * settings.frequency_penalty
            added[token] = added.get(token, 0.0) - penalty
        if not added:
            return logits
        return logits.at[:, mx.array(list(added))].add(mx.array(list(added.values()), dtype=logits.dtype))

    def _constrained(self, logits: mx.array) -> mx.array:
        allowed = None if self._constraint is None else self._constraint.allowed()
        return logits if allowed is None else mx.where(allowed, logits, -mx.inf)

    def _top(self, logprobs: mx.array) -> tuple[mx.array, mx.array] | None:
        count = min(self._settings.top_logprobs, logprobs.shape[0])
        if not count:
            return None
        ids = mx.argpartition(-logprobs, count - 1)[:count]
        return ids, logprobs[ids]

    def _draw(self, logprobs: mx.array) -> mx.array:
        settings = self._settings
        if settings.temperature < GREEDY_BELOW:
            return mx.argmax(logprobs, axis=-1)
        if settings.top_p < 1:
            logprobs = apply_top_p(logprobs, settings.top_p)
        if settings.min_p > 0:
            logprobs = apply_min_p(logprobs, settings.min_p)
        if 0 < settings.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, settings.top_k)
        self.key, key = mx.random.split(self.key)
        return mx.random.categorical(logprobs * (1.0 / settings.temperature), key=key)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf and value < 1e38


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _demand(fits: bool, name: str, value: object, wanted: str) -> None:
    if not fits:
        raise SamplingError(f"{name}={value!r} is out of range: it must be {wanted}.")
