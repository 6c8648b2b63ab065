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
    """The steps in which positions go back, in tokens.

    `trained`: distance to the first sink that no token reaches. `step`: how far it goes back when it would.
    `ceiling`: position that the model is never shown. `rebase`: how far back the rows in the window are turned when
    it would; a multiple of `step`. Where `ceiling == trained` and `rebase == step` the sinks themselves never move.
    """

    trained: int
    step: int
    ceiling: int
    rebase: int

    @classmethod
    def within(cls, trained: int, window: int, least_rebase: int = 0) -> Positions:
        """For a window of a model trained for `trained` tokens.

        A step is what the window leaves of the trained context, or an eighth of it where that is more: then the
        sinks stand for a while where the oldest tokens of the window are, which the perplexity does not show
        (docs/notebook.md). `least_rebase`: rows are turned by this or more at a time, so that few turns, each of
        which rounds, meet a row; where it is more than a step, positions pass `trained` though no distance does.
        """
        step = max(trained - window, trained // 8, 1)
        rebase = max(step, -(-least_rebase // step) * step)
        return cls(trained, step, trained - step + rebase, rebase)

    def epoch(self, token: int) -> int:
        """How many steps back token number `token` is from where the text has it, as the sinks see it."""
        return 0 if token < self.trained else 1 + (token - self.trained) // self.step

    def back(self, token: int) -> int:
        """How far the position that the model is shown for `token` is behind its number."""
        return 0 if token < self.ceiling else self.rebase * (1 + (token - self.ceiling) // self.rebase)

    def sinks_at(self, epoch: int, back: int) -> int:
        """Where the first sink stands for tokens of `epoch` that are shown `back` behind their numbers."""
        return epoch * self.step - back

    def room(self, token: int) -> int:
        """Tokens from `token` on whose positions stay below `ceiling` in one call."""
        return self.ceiling - (token - self.back(token))


@dataclass(frozen=True)
class Rotation:
    """Where a layer's rows carry their position, and how fast each pair of numbers turns with it.

    `part`: which of the two that the layer caches; the first `dims` numbers of its rows are rotated, `traditional`ly
    in neighbouring pairs or in halves, pair i by `position / freqs[i]`. A factor on the rows, as YaRN and Su have,
    was applied before they were cached and is not applied again. `steady`: whether pairs turn alike at every
    position; where not, as with a dynamic base, calls must keep below the ceiling of the positions.
    """

    part: Literal["keys", "values"]
    dims: int
    traditional: bool
    freqs: mx.array
    steady: bool = True

    @classmethod
    def of(cls, rope: Any, part: Literal["keys", "values"]) -> Rotation | None:
        """Of a rotary module of MLX or mlx-lm; None where it has no such frequencies."""
        dims = getattr(rope, "dims", None) or getattr(rope, "dim", None)
        if not isinstance(dims, int):
            return None
        traditional = bool(getattr(rope, "traditional", False))
        freqs = getattr(rope, "_freqs", None)
        if isinstance(freqs, mx.array):
            return cls(part, dims, traditional, freqs)
        base, scale = getattr(rope, "base", None), getattr(rope, "scale", 1.0)
        if not isinstance(base, int | float) or not isinstance(scale, int | float):
            return None
        freqs = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims) / scale
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
