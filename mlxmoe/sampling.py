"""From logits to a token: validated settings and a sampler with a random state of its own. Knows no text.

The filters are mlx-lm's. The random key belongs to one generation, so that a seed gives the same tokens whatever
else runs in between.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from mlxmoe.errors import SamplingError

REPETITION_TOKENS = 20  # how far back the repetition penalty looks: mlx-lm's default
GREEDY_BELOW = 1e-6  # a temperature so small overflows float32 when divided by


class Sampled(NamedTuple):
    """A token and its log-probability before temperature and filters (after the repetition penalty)."""

    token: int
    logprob: float

    @classmethod
    def of(cls, token: mx.array, logprob: mx.array) -> Sampled:
        """From the evaluated arrays of one token."""
        return cls(cast(int, token.item()), cast(float, logprob.item()))


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How tokens are chosen. Raises SamplingError for a value outside its range.

    `temperature`: 0 is greedy. `top_p`: in (0, 1], 1 is off. `top_k`: 0 is off. `min_p`: in [0, 1], 0 is off.
    `repetition_penalty`: from 0.01 to 100, 1 or None is off; it looks back 20 tokens, the prompt's included.
    `seed`: the same seed gives the same text; None takes a new one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None

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
        seed = self.seed
        _demand(seed is None or (_whole(seed) and 0 <= seed < 2**64), "seed", seed, "whole, from 0 to 2**64 - 1")


class Sampler:
    """Draws the tokens of one generation. `key`: its random state, to be evaluated with each token."""

    def __init__(self, settings: SamplingSettings) -> None:
        self._settings = settings
        seed = secrets.randbits(64) if settings.seed is None else settings.seed
        self.key = mx.random.key(seed)
        mx.eval(self.key)
        self._processors = make_logits_processors(
            repetition_penalty=settings.repetition_penalty, repetition_context_size=REPETITION_TOKENS
        )

    @property
    def looks_back(self) -> bool:
        """Whether a token depends on the `history` before it, beside the logits."""
        return bool(self._processors)

    def __call__(self, logits: mx.array, history: Sequence[int]) -> tuple[mx.array, mx.array]:
        """`logits [1, vocab]` -> the token `[]` and its log-probability `[]`, not evaluated; nor is `key` then.

        `history`: all tokens so far, the prompt's included.
        """
        if self._processors and history:
            logits = mx.array(logits)  # mlx-lm's processors write into what they are given
            recent = mx.array(list(history[-REPETITION_TOKENS:]))
            for process in self._processors:
                logits = process(recent, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        token = self._draw(logprobs)
        return token[0], mx.take(logprobs[0], token[0])

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
