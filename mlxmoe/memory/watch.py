"""A thread that has a guard check while nothing else does. Knows nothing of what the guard reads or gives back."""

from __future__ import annotations

import logging
import threading
import weakref

from mlxmoe.memory.guard import Guard

logger = logging.getLogger(__name__)


class Watch:
    """Has a guard check while nothing runs: a model that waits for its user must give back memory too.

    Ends with `close()`, or when the guard is no longer used by anyone else.
    """

    def __init__(self, guard: Guard, period_s: float = 1.0) -> None:
        self._stop = stop = threading.Event()
        watched = weakref.ref(guard, lambda _: stop.set())
        self._thread = threading.Thread(
            target=_watch, args=(watched, stop, period_s), name="mlxmoe-guard", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, waiting for a check under way. May be called twice, and by the guard's own callback."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _watch(guard: weakref.ref[Guard], stop: threading.Event, period_s: float) -> None:
    while not stop.wait(period_s):
        if (watched := guard()) is None:
            return
        try:
            watched.check()
        except Exception:  # a failed read while growing: the next request meets it too, and says so to its caller
            logger.exception("Watching the memory failed this time.")
        del watched
