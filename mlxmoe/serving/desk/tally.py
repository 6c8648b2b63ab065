"""Counts and times of a server since it began. Any thread may read; the desk's thread writes, and `refused`
who holds the desk's lock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

WINDOW_S = 5.0  # over which the present rate is taken
REPLIES_KEPT = 32


class Tally:
    """`replies` ended, `tokens` of them, `prompt_tokens` read, and requests `refused`. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.replies = self.tokens = self.prompt_tokens = self.refused = 0
        self._clock = clock
        self._began = self._last = clock()
        self._lately: deque[tuple[float, int]] = deque()
        self._took: deque[float] = deque(maxlen=REPLIES_KEPT)

    def note_tokens(self, count: int) -> None:
        """A step said `count` tokens."""
        self._last = now = self._clock()
        self.tokens += count
        self._lately.append((now, count))
        while self._lately and self._lately[0][0] < now - WINDOW_S:
            self._lately.popleft()

    def note_reply(self, seconds: float) -> None:
        """A reply ended, `seconds` after its turn came."""
        self._last = self._clock()
        self.replies += 1
        self._took.append(seconds)

    def note_activity(self) -> None:
        """Something else happened for which a model is needed."""
        self._last = self._clock()

    @property
    def tokens_per_s(self) -> float:
        since = self._clock() - WINDOW_S
        return sum(count for when, count in tuple(self._lately) if when >= since) / WINDOW_S

    def reply_s(self, doubt: float) -> float:
        """How long a reply takes, by the last ones; `doubt` where there were none."""
        took = tuple(self._took)
        return median(took) if took else doubt

    @property
    def idle_s(self) -> float:
        """Seconds since the model was last of use."""
        return self._clock() - self._last

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._began
