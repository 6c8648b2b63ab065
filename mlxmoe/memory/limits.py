"""Limits of which MLX has one in each process: held while an engine lives, put back when it closes.

Two engines share them: the one loaded last has its way.

**The pool's** bounds the freed buffers that MLX keeps for reuse, which would otherwise grow to what a prefill takes.

**The wired limit** is only held on request (`load(..., wired=True)`): wired memory is what the system may neither
compress nor swap. For it: macOS otherwise compresses what was not used for a while, and the first tokens after a
pause are slow; people report large gains on machines with memory to spare. Against it: wired memory cannot give way,
and on machines that are nearly full people report kernel panics with it (3 of 3 runs on an M4 mini with 32 GB) and
none without (0 of 10). mlx-lm's own `stream_generate` always wires. Reported, not measured here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import mlx.core as mx

logger = logging.getLogger(__name__)


class HeldLimit:
    """A limit that is set, and put back by `undo()`. `set_limit(nbytes)`: sets it and returns what it was."""

    def __init__(self, set_limit: Callable[[int], int], nbytes: int) -> None:
        self._set_limit = set_limit
        self._before: int | None = set_limit(nbytes)

    def undo(self) -> None:
        """Set the limit that was there before. May be called twice."""
        before, self._before = self._before, None
        if before is not None:
            self._set_limit(before)


def hold_pool(nbytes: int) -> HeldLimit:
    """Let MLX keep at most `nbytes` of freed buffers."""
    return HeldLimit(mx.set_cache_limit, nbytes)


def hold_wired(nbytes: int, working_set_bytes: int | None) -> HeldLimit | None:
    """Wire up to `nbytes`, within the GPU's working set; None, with a warning, where there is no GPU."""
    if working_set_bytes is None:
        logger.warning("wired=True has no effect: there is no GPU whose memory could be wired.")
        return None
    return HeldLimit(mx.set_wired_limit, min(nbytes, working_set_bytes))
