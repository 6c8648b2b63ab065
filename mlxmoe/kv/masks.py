"""Which of the rows that a window hands out each token of a call attends to. Pure numbers: knows no rows.

Legend: T tokens of a call, K rows that it is handed: the sinks once more for every later epoch in the call, then the
sinks, the window and the T tokens in the order of the text; a call of one token gets the window's slots as they lie.
"""

from __future__ import annotations

import mlx.core as mx

from mlxmoe.kv.positions import Positions


def window_mask(
    start: int, stop: int, window: int, sinks: int, positions: Positions | None, own_window: int | None
) -> mx.array:
    """`[T, K]` for tokens `start` to `stop`; `own_window`: a window of the layer's own, which narrows this one."""
    recent, sinks = min(window - sinks, stop), min(sinks, stop)  # what is larger may be no number that MLX has
    tokens, epochs = _columns(start, stop, recent, sinks, positions)
    asking = mx.arange(start, stop)[:, None]
    distance = asking - tokens
    allowed = (distance >= 0) & mx.where(tokens < sinks, epochs == _epochs(asking, positions), distance < recent)
    return allowed if own_window is None else allowed & (distance < own_window)


def _columns(
    start: int, stop: int, recent: int, sinks: int, positions: Positions | None
) -> tuple[mx.array, mx.array]:
    """The token of each row, and for sinks the epoch that they are there for; `recent`: the window's other tokens."""
    first, kept = mx.arange(sinks), min(sinks, start)
    now, last = (0, 0) if positions is None else (positions.epoch(start), positions.epoch(stop - 1))
    if stop - start == 1 and start >= sinks + recent:
        tokens = mx.concatenate([first, start - (start - sinks - mx.arange(recent)) % recent])
        return tokens, mx.full(tokens.shape, now)
    tokens = mx.concatenate([first[:kept], mx.arange(max(kept, start - recent), stop)])
    epochs = mx.full(tokens.shape, now)
    if last > now and sinks:
        tokens = mx.concatenate([mx.tile(first, last - now), tokens])
        epochs = mx.concatenate([mx.repeat(mx.arange(now + 1, last + 1), sinks), epochs])
    return tokens, epochs


def _epochs(tokens: mx.array, positions: Positions | None) -> mx.array:
    """`Positions.epoch` of many."""
    if positions is None:
        return mx.zeros_like(tokens)
    beyond = tokens - positions.trained
    return mx.where(beyond < 0, 0, 1 + beyond // positions.step)
