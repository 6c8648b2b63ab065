"""Which positions cached tokens are shown at, once a text is longer than the model was trained for.

Rotary attention sees distances only. Up to the trained context every token has its own place in the text, as in a
cache without a window. Beyond it a token's distance to the sinks is no longer what the text says but stays within
what the model was trained for, as in StreamingLLM (Xiao et al. 2023, arXiv 2309.17453, section 3.2), in steps:
between two steps all positions count on as usual. Everything here is a function of the token's number alone, so that
it does not matter how a text is divided into calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE


@dataclass(frozen=True, slots=True)
class Positions:
    """`trained`: the first position that the model is not shown. `step`: how far they go back when they would."""

    trained: int
    step: int

    @staticmethod
    def most_sinks(trained: int) -> int:
        """As many sinks as leave an eighth of the trained context for steps.

        With more, a step is a few tokens or one: the whole window is turned for nearly every token, and a call of
        many is handed the sinks as many times.
        """
        return trained - max(trained // 8, 1)

    @classmethod
    def within(cls, trained: int, window: int, sinks: int) -> Positions:
        """For a window of a model trained for `trained` tokens, of which the first `sinks` stay.

        A step is what the window leaves of the trained context, so that a row is turned once while it is in a window
        of half the context or less; or an eighth of the context where that is more: then the sinks stand for a while
        where the oldest tokens of the window are. No step goes back behind the last sink: a token that attends to
        one with a later position than its own is nothing that a model was trained on. Up to `most_sinks` that is
        never less than the eighth.
        """
        return cls(trained, max(min(max(trained - window, trained // 8), trained - sinks), 1))

    def epoch(self, token: int) -> int:
        """How many steps back token number `token` is from where the text has it."""
        return 0 if token < self.trained else 1 + (token - self.trained) // self.step

    def back(self, token: int) -> int:
        """How far back that is, in tokens."""
        return self.epoch(token) * self.step

    def room(self, token: int) -> int:
        """Tokens from `token` on whose positions stay in the trained context in one call."""
        return self.trained - (token - self.back(token))


@dataclass(frozen=True)
class Rotation:
    """Where a layer's rows carry their position, and how fast each pair of numbers turns with it.

    `part`: which of the two that the layer caches; the first `dims` numbers of its rows are rotated, `traditional`ly
    in neighbouring pairs or in halves, pair i by `position / freqs[i]`. A factor on the rows, as YaRN and Su have,
    was applied before they were cached and is not applied again. `steady`: whether pairs turn alike at every
    position; where not, as with a dynamic base, no call may go beyond the trained context.
    """

    part: Literal["keys", "values"]
    dims: int
    traditional: bool
    freqs: mx.array  # evaluated: any thread may ask for rows to be moved
    steady: bool = True

    @classmethod
    def of(cls, rope: Any, part: Literal["keys", "values"]) -> Rotation | None:
        """Of a rotary module of MLX or mlx-lm; None where it has no such frequencies."""
        dims = getattr(rope, "dims", None) or getattr(rope, "dim", None)
        if not isinstance(dims, int):
            return None
        traditional = bool(getattr(rope, "traditional", False))
        freqs = getattr(rope, "_freqs", None)
        if not isinstance(freqs, mx.array):
            base, scale = getattr(rope, "base", None), getattr(rope, "scale", 1.0)
            if not isinstance(base, int | float) or not isinstance(scale, int | float):
                return None
            freqs = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims) / scale
        mx.eval(freqs)  # MLX cannot evaluate in one thread what another has built, and any thread may stream
        return cls(part, dims, traditional, freqs, not isinstance(rope, DynamicNTKScalingRoPE))

    def moved(self, rows: mx.array, by: int) -> mx.array:
        """`rows [B, H, L, D]` as they would be `by` positions further on; the input itself for 0."""
        if by == 0 or rows.shape[2] == 0:
            return rows
        flat = rows.reshape(rows.shape[0], -1, 1, rows.shape[3])  # one token each: all move alike
        turned = mx.fast.rope(
            flat, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=by, freqs=self.freqs
        )
        return turned.reshape(rows.shape)
