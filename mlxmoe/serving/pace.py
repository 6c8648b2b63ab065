"""How many replies at once are worth it on this machine, from the steps themselves. Pure Python.

A batch is grown by one for as long as that made more tokens per second, and not beyond the size from which on it did
not. What was measured is forgotten after some time: contexts grow and the expert cache is resized.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

STEPS = 8  # of one size before it is judged
STEPS_KEPT = 32
GAIN = 0.03  # more tokens per second, from which on a larger batch counts as faster
FORGET_S = 120.0


class Pace:
    """`most`: replies at once, whatever was measured. `clock`: monotonic seconds."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._steps: dict[int, deque[tuple[float, float]]] = {}  # of each size: when, and seconds

    def note(self, size: int, seconds: float) -> None:
        """A step gave `size` replies a token each, and read no prompt."""
        self._steps.setdefault(size, deque(maxlen=STEPS_KEPT)).append((self._clock(), seconds))

    @property
    def allowed(self) -> int:
        """Replies at once that are to be under way now, if so many are wanted."""
        size = 1
        while size < self._most and self._is_worth_more(size):
            size += 1
        return size

    @property
    def best(self) -> int | None:
        """The size beyond which more were not faster; None while that is not known."""
        size = self.allowed
        return size if size < self._most and self._rate(size + 1) is not None else None

    def _is_worth_more(self, size: int) -> bool:
        """Whether one more than `size` was faster, or has to be tried."""
        rate, more = self._rate(size), self._rate(size + 1)
        return rate is not None and (more is None or more > rate * (1 + GAIN))

    def _rate(self, size: int) -> float | None:
        """Tokens per second of all replies together; None where too few steps are known."""
        steps, since = self._steps.get(size, deque()), self._clock() - FORGET_S
        while steps and steps[0][0] < since:
            steps.popleft()
        return size / median(seconds for _, seconds in steps) if len(steps) >= STEPS else None
