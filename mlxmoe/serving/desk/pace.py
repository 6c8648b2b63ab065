"""How many replies at once are worth it on this machine, from the steps themselves. Pure Python.

A batch is grown by one as long as that made more tokens per second, and not beyond the smallest size that is as good
as the best. What was measured is forgotten after a while: contexts grow, the expert cache is resized, and a machine
that had other things to do tells nothing of itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import quantiles

STEPS = 8  # of one size before it is judged
STEPS_KEPT = 32
GAIN = 0.03  # more tokens per second, from which on a larger batch counts as faster
FORGET_S = 30.0
FORGET_STEPS = 64  # as long as so many like it take: slow steps are few, the more so while long prompts are read


class Pace:
    """`most`: replies at once, whatever was measured. `clock`: monotonic seconds. One thread notes, any may ask."""

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
        size = self._fastest
        return min(size if size and self._rate(size + 1) else size + 1, self._most)

    @property
    def best(self) -> int | None:
        """The size beyond which more were not faster; None while that is not known."""
        size = self._fastest
        return size if size and size < self._most and self._rate(size + 1) else None

    @property
    def _fastest(self) -> int:
        """The smallest size that is as good as any; 0 where nothing is known."""
        rates = {size: rate for size in sorted(self._steps) if (rate := self._rate(size))}
        enough = max(rates.values(), default=0.0) / (1 + GAIN)
        return next((size for size, rate in rates.items() if rate >= enough), 0)

    def _rate(self, size: int) -> float | None:
        """Tokens per second of all replies together; None where too few steps are known.

        By the quicker steps: whatever else the machine did made the others longer.
        """
        now = self._clock()
        known = tuple(self._steps.get(size, ()))  # other threads may ask, too: nothing is changed here
        steps = [s for when, s in known if now - when <= max(FORGET_S, FORGET_STEPS * s)]
        return size / quantiles(steps)[0] if len(steps) >= STEPS else None
