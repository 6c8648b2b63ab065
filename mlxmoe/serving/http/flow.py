"""The replies of one request: submitted together, heard in the order in which things happen, cancelled together.

Carries events from the thread that owns the model to the event loop. Knows neither HTTP nor what is made of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from mlxmoe.serving.jobs import Ask, Desk, Event, Failed, Job, Spoken


class Replies:
    """A context, to be entered within the event loop: what has not ended when it is left is cancelled.

    Entering it submits, and raises what Desk.submit raises.
    """

    def __init__(self, desk: Desk, asks: Sequence[Ask]) -> None:
        self._desk = desk
        self._asks = asks
        self._jobs: list[Job] = []
        self._open: set[int] = set()
        self._begun: set[int] = set()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def __enter__(self) -> Replies:
        loop = asyncio.get_running_loop()
        try:
            for number, ask in enumerate(self._asks):
                self._jobs.append(self._desk.submit(ask, _Teller(loop, self._events, number)))
                self._open.add(number)
        except BaseException:
            self.cancel()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    @property
    def ended(self) -> bool:
        """Whether all have been heard to their ends."""
        return not self._open

    @property
    def begun(self) -> bool:
        """Whether the turn of all has come."""
        return len(self._begun) == len(self._jobs)

    @property
    def position(self) -> int:
        """How many are before the last of these in the queue."""
        return max((job.position for job in self._jobs), default=0)

    async def next(self, wait_s: float | None = None) -> tuple[int, Event] | None:
        """The next event, and of which ask by its number; None where none came within `wait_s` seconds."""
        while True:
            try:
                async with asyncio.timeout(wait_s) as limit:
                    number, event = await self._events.get()
            except TimeoutError:
                if limit.expired():
                    return None
                raise
            if number not in self._open:  # it was on its way when its job was cancelled
                continue
            self._begun.add(number)
            if isinstance(event, Failed) or (isinstance(event, Spoken) and event.chunk.finish_reason is not None):
                self._open.discard(number)
            return number, event

    def end(self, number: int) -> None:
        """Nobody wants the rest of this one."""
        if number in self._open:
            self._open.discard(number)
            self._jobs[number].cancel()

    def cancel(self) -> None:
        """Nobody wants the rest of any."""
        for number in sorted(self._open):
            self.end(number)


class _Teller:
    """`tell` of one job: called by the other thread, puts events into the loop's queue."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, events: asyncio.Queue[tuple[int, Event]], number: int
    ) -> None:
        self._loop = loop
        self._events = events
        self._number = number

    def __call__(self, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (self._number, event))
        except RuntimeError:  # the loop was closed: the server has ended, and nobody listens
            return
