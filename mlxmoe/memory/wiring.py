"""Wired memory, on request only: the part of a GPU's memory that the system may not compress or swap.

For it: macOS otherwise compresses what was not used for a while, and the first tokens after a pause are slow; people
report large gains on machines with memory to spare. Against it: wired memory cannot give way, and on machines that
are nearly full people report kernel panics with it (3 of 3 runs on an M4 mini with 32 GB) and none without (0 of 10).
Hence off unless asked for. mlx-lm's own `stream_generate` always wires. Reported, not measured here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import mlx.core as mx

logger = logging.getLogger(__name__)


class Wiring:
    """Holds a wired limit until it is undone. MLX has one limit a process: the last engine to ask has its way.

    `working_set_bytes`: what the GPU recommends to keep at most, None without a GPU, where wiring has no meaning.
    """

    def __init__(
        self,
        nbytes: int,
        working_set_bytes: int | None,
        set_limit: Callable[[int], int] = mx.set_wired_limit,
    ) -> None:
        self._set_limit = set_limit
        self._before: int | None = None
        if working_set_bytes is None:
            logger.warning("wired=True has no effect: there is no GPU whose memory could be wired.")
            return
        self._before = set_limit(min(nbytes, working_set_bytes))

    def undo(self) -> None:
        """Set the limit that was there before. May be called twice."""
        if self._before is not None:
            self._set_limit(self._before)
            self._before = None
