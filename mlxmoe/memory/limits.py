"""Limits of which MLX has one in each process: held while an engine lives, put back when it closes.

Where several engines live, the one loaded last has its way; when none does, what was there before is put back.

**The pool's** bounds the freed buffers that MLX keeps for reuse, which would otherwise grow to what a prefill takes.

**The wired limit** is only held on request (`load(..., wired=True)`): wired memory is what the system may neither
compress nor swap. For it: macOS otherwise compresses what was not used for a while, and the first tokens after a
pause are slow; people report large gains on machines with memory to spare. Against it: wired memory cannot give way,
and on machines that are nearly full people report kernel panics with it (3 of 3 runs on an M4 mini with 32 GB) and
none without (0 of 10). mlx-lm's own `stream_generate` always wires. Reported, not measured here.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable

import mlx.core as mx

logger = logging.getLogger(__name__)


class SharedLimit:
    """One of MLX's limits, and who holds it. `set_limit(nbytes)`: sets it and returns what it was."""

    def __init__(self, set_limit: Callable[[int], int]) -> None:
        self._set_limit = set_limit
        self._lock = threading.RLock()  # garbage collection may let go while another takes hold
        self._holders: dict[object, int] = {}  # in the order in which they came
        self._before = 0

    def hold(self, nbytes: int, holder: object) -> Callable[[], object]:
        """Set the limit for `holder`; call what is returned to let go, which also happens when the holder is gone."""
        token = object()
        with self._lock:
            before = self._set_limit(nbytes)
            if not self._holders:
                self._before = before
            self._holders[token] = nbytes
        return weakref.finalize(holder, self._let_go, token, os.getpid())

    def _let_go(self, token: object, process: int) -> None:
        if os.getpid() != process:
            return  # a fork's MLX has lost its threads: a call of it may wait for ever
        with self._lock:
            self._holders.pop(token, None)
            self._set_limit(next(reversed(self._holders.values()), self._before))


# MLX has one of each in a process, so there is one of each here.
_POOL = SharedLimit(lambda nbytes: mx.set_cache_limit(nbytes))
_WIRED = SharedLimit(lambda nbytes: mx.set_wired_limit(nbytes))


def hold_pool(nbytes: int, holder: object) -> Callable[[], object]:
    """Let MLX keep at most `nbytes` of freed buffers, until the returned function is called or `holder` is gone."""
    return _POOL.hold(nbytes, holder)


def hold_wired(nbytes: int, working_set_bytes: int | None, holder: object) -> Callable[[], object]:
    """Wire up to `nbytes`, within the GPU's working set; where there is no GPU, only warn."""
    if working_set_bytes is None:
        logger.warning("wired=True has no effect: there is no GPU whose memory could be wired.")
        return lambda: None
    return _WIRED.hold(min(nbytes, working_set_bytes), holder)
