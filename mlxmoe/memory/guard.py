"""Watching the pressure, and what to give back, cheapest first. Knows readings and callables, not experts or KV.

The operating system's own level decides, never a guess from free bytes alone. Restrictions come at once and go only
when the level has stayed lower for a while; what was given back is taken again in steps, once it has been calm.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlxmoe.errors import CheckpointReadError
from mlxmoe.memory.reading import Pressure, Reading, usable_bytes
from mlxmoe.memory.sizes import format_bytes
from mlxmoe.memory.speeds import Speeds

logger = logging.getLogger(__name__)

Action = Literal["pressure", "shrink", "restrict", "finish", "grow", "settled", "admit", "resize"]

EVENTS_KEPT = 100
COSTS_KEPT = 8  # of readings
CHECKS_SHARE = 0.005  # of the time between two checks that a reading may take

_RANK: dict[Pressure, int] = {"normal": 0, "warning": 1, "critical": 2}


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Something the guard noticed or did. `text` says it in words.

    `pressure`: as the operating system said it then. `action`: "pressure" (it changed), "shrink" and "grow" (`nbytes`
    given back or taken), "restrict" (smaller prefill chunks, no new requests), "finish" (replies are ended),
    "settled" (growing again made nothing faster, so it stops), "admit" (a request took `nbytes` from the experts),
    "resize" (by the caller). `time_s`: of the guard's clock, `time.monotonic`.
    """

    time_s: float
    pressure: Pressure
    action: Action
    nbytes: int
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Something that can be given back. `name`: what it is, in an event's words.

    `step()` gives back a part, `everything()` all that can be spared: both return the bytes, 0 where nothing is left.
    """

    name: str
    step: Callable[[], int]
    everything: Callable[[], int]


@dataclass(frozen=True, slots=True)
class GuardTimes:
    """Seconds. `check_s`: between two readings at least. `settle_s`: from a step to the next, so that the system's
    level can follow. `fall_s`: that the level must have been lower before restrictions are lifted. `calm_s`: of
    normal pressure before something is taken again, and between two such steps; doubled, up to `longest_calm_s`,
    whenever taking brought the pressure back. `finish_s`: of critical pressure with nothing left to give before
    replies end.
    """

    check_s: float = 0.1
    settle_s: float = 0.5
    fall_s: float = 5.0
    calm_s: float = 10.0
    longest_calm_s: float = 600.0
    finish_s: float = 3.0


class Guard:
    """Reads the pressure at a bounded rate, and acts on it. Any thread may call; one at a time checks.

    `read`: takes a reading. `free_pool`: returns what MLX keeps for reuse. `reclaims`: what else can be given back,
    cheapest first. `grow(most_bytes)`: takes a step of it again, within `most_bytes`; returns the bytes.
    `on_event`: told every event. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        read: Callable[[], Reading],
        free_pool: Callable[[], object],
        reclaims: Sequence[Reclaim],
        grow: Callable[[int], int],
        *,
        on_event: Callable[[MemoryEvent], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        times: GuardTimes | None = None,
    ) -> None:
        self.pressure: Pressure = "normal"
        self.must_finish = False
        self._read = read
        self._free_pool = free_pool
        self._reclaims = tuple(reclaims)
        self._grow = grow
        self._on_event = on_event
        self._clock = clock
        self._times = times or GuardTimes()
        self._lock = threading.Lock()
        self._events: deque[MemoryEvent] = deque(maxlen=EVENTS_KEPT)
        self._costs: deque[float] = deque(maxlen=COSTS_KEPT)
        now = clock()
        self._next_check = now
        self._lower_since: float | None = None  # readings below the level that is held
        self._last_step = -self._times.settle_s + now
        self._pressed = False  # something was given back under pressure, and not all of it is taken again
        self._last_pressure = now
        self._last_growth: float | None = None
        self._calm_s = self._times.calm_s
        self._empty_since: float | None = None  # critical, and nothing left to give
        self._speeds = Speeds(self._times.longest_calm_s)

    @property
    def events(self) -> tuple[MemoryEvent, ...]:
        """The latest events, the oldest first."""
        return tuple(self._events)

    @property
    def restricts(self) -> bool:
        """Whether prefill chunks are to be small and nothing new may begin."""
        return self.pressure == "critical"

    def check(self) -> None:
        """Read and act, unless it was done just now or somebody is at it. Call it outside any pass."""
        if self._lock.locked():
            return
        with self._lock:  # not acquire() and try: a Ctrl-C between the two would keep it for ever
            start = self._clock()
            if start < self._next_check:
                return
            reading = self._read()
            self._costs.append(self._clock() - start)
            # The cheapest of the last: one that waited for a processor says nothing of the next.
            self._next_check = start + max(self._times.check_s, min(self._costs) / CHECKS_SHARE)
            self._follow(reading.pressure, start)
            match reading.pressure:
                case "normal":
                    self._take_again(reading, start)
                case "warning":
                    self._give_step(start)
                case "critical":
                    self._give_everything(start)

    def note_step(self, seconds: float) -> None:
        """A decode step took `seconds`: what tells whether growing pays."""
        self._speeds.note(seconds)

    def resized(self) -> None:
        """Somebody else moved the line: what was learnt of speeds no longer holds."""
        self._speeds.forget()

    def tell(self, action: Action, nbytes: int, text: str, *, level: int = logging.INFO) -> None:
        """Record an event, log it, and tell whoever asked to be told."""
        event = MemoryEvent(self._clock(), self.pressure, action, nbytes, text)
        self._events.append(event)
        logger.log(level, "%s", text)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:  # a caller's mistake must not end a reply half-way
                logger.exception("The callback for memory events failed on: %s", text)

    def _follow(self, now_is: Pressure, now: float) -> None:
        """Hold the worse level until readings have been lower for a while."""
        if now_is != "normal":
            self._last_pressure = now
        if _RANK[now_is] >= _RANK[self.pressure]:
            self._lower_since = None
            if now_is != self.pressure:
                self.pressure = now_is
                self.tell("pressure", 0, f"The system's memory pressure is {now_is}.")
                if now_is == "critical":
                    self.tell("restrict", 0, "Until it eases no new request begins; prompts go in small chunks.")
            return
        self._lower_since = now if self._lower_since is None else self._lower_since
        if now - self._lower_since >= self._times.fall_s:
            self.pressure = now_is
            self._lower_since = None
            self.must_finish = False
            self._empty_since = None
            self.tell("pressure", 0, f"The system's memory pressure is {now_is} again.")

    def _give_step(self, now: float) -> None:
        """One step of the cheapest thing that has something to give."""
        self._empty_since = None
        self._free_pool()
        if now - self._last_step < self._times.settle_s:
            return
        for reclaim in self._reclaims:
            if given := reclaim.step():
                self._gave(reclaim, given, now)
                return

    def _give_everything(self, now: float) -> None:
        """All that can be spared; where there was nothing for some time, replies have to end."""
        self._free_pool()
        given = 0
        for reclaim in self._reclaims:
            if got := reclaim.everything():
                self._gave(reclaim, got, now)
            given += got
        if given:
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = now
        elif now - self._empty_since >= self._times.finish_s and not self.must_finish:
            self.must_finish = True
            text = "Memory pressure stays critical and nothing is left to give back: replies end where they are."
            self.tell("finish", 0, text, level=logging.WARNING)

    def _gave(self, reclaim: Reclaim, given: int, now: float) -> None:
        if self._last_growth is not None and now - self._last_growth < 2 * self._calm_s:
            self._calm_s = min(2 * self._calm_s, self._times.longest_calm_s)
        self._last_step = now
        self._pressed = True
        self._speeds.forget()
        text = f"Memory pressure is {self.pressure}: {reclaim.name} gave back {format_bytes(given)}."
        self.tell("shrink", given, text, level=logging.WARNING)

    def _take_again(self, reading: Reading, now: float) -> None:
        """A step up, where it has been calm, the machine has room for it, and the last step made something faster."""
        self._empty_since = None
        since = max(self._last_pressure, self._last_growth or self._last_pressure)
        if now - since >= self._times.longest_calm_s:
            self._calm_s = self._times.calm_s
        room = usable_bytes(reading)
        if self.pressure != "normal" or (self._pressed and now - since < self._calm_s) or room <= 0:
            return
        match self._speeds.judge(now):
            case "wait" | "settled":
                return
            case "stop":
                self.tell("settled", 0, "A larger expert cache made decoding no faster, twice: it stays as it is.")
                return
        try:
            taken = self._grow(room)
        except CheckpointReadError as error:
            self._pressed, self._last_growth = True, self._clock()  # tried again when it has been calm for longer
            self._calm_s = min(2 * self._calm_s, self._times.longest_calm_s)
            self.tell("settled", 0, f"The expert cache cannot grow just now: {error}", level=logging.WARNING)
            return
        if taken:
            self._speeds.grown()
            self._last_growth = self._clock()
            self.tell("grow", taken, f"Memory pressure is normal: the expert cache took {format_bytes(taken)} again.")
        else:
            self._pressed = False  # all is back: what a request takes from now on may be taken again at once
