"""Whether growing still pays, by what decode steps took before and after. Knows no readings and grows nothing."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal

STEPS_KEPT = 64
STEPS_COMPARED = 16  # decode steps after a growth before its effect is judged
GAIN = 0.02  # of a decode step's time, from which on a growth counts as one
GROWTHS_IN_VAIN = 2  # in a row, after which growing stops for a while


class Speeds:
    """Whether a larger expert cache still makes decoding faster, by what the steps took before and after."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self.forget()

    def note(self, seconds: float) -> None:
        self._steps.append(seconds)

    def forget(self) -> None:
        """Somebody moved the line: what was learnt no longer holds."""
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)
        self._before: float | None = None
        self._in_vain = 0
        self._settled_s: float | None = None

    def grown(self) -> None:
        """The cache has grown: what the steps take from here on is to be less than what they took."""
        self._before = self._median
        self._steps.clear()

    def judge(self, now: float) -> Literal["grow", "wait", "stop", "settled"]:
        """What the last growth says about the next: "stop" once, when it turns out that none pays, then "settled".

        Twice in a row, because one comparison of a few steps may be chance; and some time later it is tried again.
        """
        if self._settled_s is not None:
            if now - self._settled_s < self._retry_s:
                return "settled"
            self._in_vain, self._settled_s = 0, None
        if self._before is None:
            return "grow"
        after = self._median
        if after is None:
            return "wait"
        self._in_vain = 0 if after < (1 - GAIN) * self._before else self._in_vain + 1
        self._before = None
        if self._in_vain < GROWTHS_IN_VAIN:
            return "grow"
        self._settled_s = now
        return "stop"

    @property
    def _median(self) -> float | None:
        return median(self._steps) if len(self._steps) >= STEPS_COMPARED else None
