"""The desk: takes asks from any thread, and has one thread that owns the engine answer them. Knows no HTTP.

MLX's objects are made, used and let go in that thread alone; prompts become tokens in others, meanwhile. Between two
steps it looks at what is new: cancelled replies go, waiting ones come while memory and pace allow, the model is
unloaded when nobody asked for long, and loaded again. Whatever fails, the thread goes on until `close()`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlxmoe.engine import Engine
from mlxmoe.errors import EngineClosedError, MemoryPressureError, MlxMoeError, QueueFullError
from mlxmoe.reply import ReplySettings
from mlxmoe.serving.desk.item import WorkItem
from mlxmoe.serving.desk.limits import DeskLimits
from mlxmoe.serving.desk.preparing import Preparing
from mlxmoe.serving.desk.queue import FairQueue
from mlxmoe.serving.desk.tally import Tally
from mlxmoe.serving.desk.work import Work
from mlxmoe.serving.jobs import Ask, Event, Failed, ModelFacts, State, Status

logger = logging.getLogger(__name__)

TICK_S = 0.05  # between two looks while something waits and nothing can be done
DOUBT_S = 2.0  # what a client is told to wait where nothing is known of how long replies take


class EngineDesk:
    """A `Desk` over an engine. `load`: makes the engine, in the desk's own thread. `name`: what the model is called.

    `start()` before anything else, `close()` at the end.
    """

    def __init__(self, load: Callable[[], Engine], name: str, limits: DeskLimits | None = None) -> None:
        self.limits = limits or DeskLimits()
        self._load = load
        self._name = name
        self._facts: ModelFacts | None = None
        self._changed = threading.Condition()  # guards what follows
        self._queue: FairQueue[WorkItem] = FairQueue()
        self._prepared = 0  # asks so far
        self._state: State = "loading"
        self._closing: float | None = None  # when what is left is cut short, once it is to end
        self._failure: BaseException | None = None
        self._work: Work | None = None  # set by the desk's thread; others only look
        self._tally = Tally()
        self._thread = threading.Thread(target=self._run, name="mlxmoe-desk", daemon=True)

    @property
    def model(self) -> ModelFacts:
        assert self._facts is not None, "start() has not returned"
        return self._facts

    @property
    def ending(self) -> bool:
        """Whether it is being closed, or is closed."""
        return self._closing is not None

    def start(self) -> None:
        """Load the model. Raises what that raises, and then nothing is left behind."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._state != "loading")
        if self._facts is None:
            self._thread.join()
            raise self._failure or EngineClosedError("The server was closed while it loaded its model.")

    def close(self, drain_s: float = 0.0) -> None:
        """Take nothing new, give what is under way `drain_s` seconds to end, then stop. May be called twice."""
        with self._changed:
            end = time.monotonic() + drain_s
            self._closing = end if self._closing is None else min(end, self._closing)
            if self._state != "failed":
                self._state = "draining"
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, ask: Ask, tell: Callable[[Event], None]) -> WorkItem:
        only_scores = ask.score_prompt and ask.options.get("max_tokens") == 0
        options: dict[str, Any] = {"max_tokens": self.limits.max_tokens, **ask.options}
        if only_scores:
            options["max_tokens"] = 1
        settings = ReplySettings.check(**options)
        item = WorkItem(
            ask, settings, tell, speaks=not only_scores, free="max_tokens" not in ask.options, place=self._places
        )
        with self._changed:
            if self._closing is not None:
                raise EngineClosedError("The server is shutting down.")
            accepts, reason = self._accepts()
            if not accepts:
                self._tally.refused += 1
                raise MemoryPressureError(reason)
            waiting = sum(not item.cancelled for item in self._queue)
            full = waiting >= self.limits.most_waiting and (waiting or self._under_way >= self.limits.most_together)
            if full and not ask.follows:
                self._tally.refused += 1
                raise QueueFullError(
                    f"{waiting} requests wait already, as many as this server takes on. Ask again later.",
                    self._tally.reply_s(DOUBT_S),
                )
            self._queue.put(ask.client, item)
            if self._work is not None:
                self._work.preparing.one_more()
            self._changed.notify_all()
        return item

    def status(self, *, heat: bool = False, whole: bool = True) -> Status:
        work = self._work
        with self._changed:
            accepts, reason = self._accepts()
            queued, state = len(self._queue), self._state
        facts = Status(
            state=state,
            accepts=accepts,
            reason=reason,
            queued=queued,
            active=self._under_way,
            best_batch=None if work is None else work.pace.best,
            pressure="normal" if work is None else work.engine.pressure,
            tokens_per_s=self._tally.tokens_per_s,
            replies=self._tally.replies,
            tokens=self._tally.tokens,
            prompt_tokens=self._tally.prompt_tokens,
            refused=self._tally.refused,
            uptime_s=self._tally.uptime_s,
        )
        if work is None or not whole:
            return facts
        facts = replace(facts, memory=work.engine.memory(), stats=work.engine.stats())
        if not heat:
            return facts
        return replace(facts, heat=work.heat.seen(), resident=work.engine.residents())

    @property
    def _under_way(self) -> int:
        work = self._work
        return 0 if work is None else len(work.items)

    def _accepts(self) -> tuple[bool, str]:
        """Whether new work is taken, and why not."""
        if self._closing is not None:
            return False, "The server is shutting down."
        work = self._work
        if work is not None and work.engine.pressure == "critical":
            return False, "The machine is critically short of memory: nothing new is begun until that eases."
        return True, ""

    def _places(self, item: WorkItem) -> int:
        with self._changed:
            return self._queue.place(item)

    def _next_to_prepare(self) -> WorkItem | None:
        with self._changed:
            item = self._queue.first(lambda item: not item.taken and not item.cancelled)
            if item is not None:
                item.taken = True
            return item

    def _note_prepared(self) -> None:
        with self._changed:
            self._prepared += 1
            self._changed.notify_all()

    # What follows runs in the desk's own thread.

    def _run(self) -> None:
        try:
            self._open()
        except BaseException as error:  # start() raises it
            self._failure = error
        try:
            while self._failure is None and self._goes_on():
                pass
        finally:
            with self._changed:
                self._state = "failed" if self._closing is None else self._state
                self._closing = self._closing or time.monotonic()
                left = list(self._queue)
                self._queue = FairQueue()
                self._changed.notify_all()
            self._shut(EngineClosedError("The server has stopped."), left)
            mx.clear_streams()  # a thread that computed must not take its streams to the end of the process

    def _open(self) -> None:
        """Load the model; the first time its facts are noted. What fails is told to all that wait for it."""
        with self._changed:
            self._state = "loading" if self._closing is None else self._state
        engine = self._load()
        preparing = Preparing(engine, self._next_to_prepare, self._note_prepared)
        work = Work(engine, self.limits, self._tally, preparing)
        if self._facts is None:
            self._facts = work.facts(self._name, created=int(time.time()))
        self._tally.note_activity()  # idleness begins now, however long that took
        with self._changed:
            self._work = work
            for _ in self._queue:
                preparing.one_more()
            self._state = "ready" if self._closing is None else self._state
            self._changed.notify_all()

    def _goes_on(self) -> bool:
        """A turn, whatever fails in it; False when it is time to end."""
        try:
            return self._turn()
        except Exception as error:  # nothing is known that gets here
            logger.exception("The server's working thread failed. It begins anew, and loads the model when asked to.")
            work = self._take_work()
            self._refuse_waiting(error)
            if work is not None:
                with suppress(Exception):  # it may be in any state
                    work.close(EngineClosedError("The server failed, and begins anew."))
            return True

    def _turn(self) -> bool:
        """What there is to do now, or the wait for it; False when it is time to end."""
        if self._work is not None:
            self._work.drop_cancelled()
        with self._changed:
            for item in [item for item in self._queue if item.cancelled]:
                self._queue.remove(item)
            idle = not len(self._queue) and not self._under_way
            if self._closing is not None and (idle or time.monotonic() >= self._closing):
                return False
            if idle:
                left = self._idle_left_s
                if left is None or left > 0:
                    self._changed.wait(left)
                    return True
        if idle:
            self._unload()
        elif self._work is not None or self._open_again():
            self._go_on()
        return True

    def _go_on(self) -> None:
        """Begin the next one, if it can begin, and compute a step."""
        assert self._work is not None
        prepared = self._prepared
        admitted = self._admit(self._work)
        if not self._work.step() and not admitted:  # all wait for memory, or are being prepared
            with self._changed:
                self._changed.wait_for(lambda: self._prepared != prepared or self.ending, TICK_S)

    @property
    def _idle_left_s(self) -> float | None:
        """Seconds of idleness until the model is unloaded; None for ever."""
        keep_s = self.limits.keep_alive_s
        return None if self._work is None or keep_s is None else keep_s - self._tally.idle_s

    def _take_work(self) -> Work | None:
        """From now on nothing is loaded, for who submits, too."""
        with self._changed:
            work, self._work = self._work, None
        return work

    def _unload(self) -> None:
        work = self._take_work()
        with self._changed:
            self._state = "unloaded" if self._closing is None else self._state
        if work is not None:
            work.close(EngineClosedError("The model was unloaded."))
            logger.info("The model was unloaded: nobody asked for %g s.", self.limits.keep_alive_s)

    def _open_again(self) -> bool:
        """The model was unloaded and is wanted; where it cannot be had, all who wait for it are told."""
        try:
            self._open()
        except Exception as error:
            logger.warning("The model cannot be loaded again: %s", error)
            text = "The model was unloaded, and it cannot be loaded again just now. Ask again later."
            self._refuse_waiting(EngineClosedError(text))  # whatever it was, the asks are not to blame
            return False
        return True

    def _refuse_waiting(self, error: Exception) -> None:
        """Nothing is loaded, and all that wait are told `error`."""
        with self._changed:
            waiting = list(self._queue)
            self._queue = FairQueue()
            self._state = "unloaded" if self._closing is None else self._state
        for item in waiting:
            item.tell(Failed(error))

    def _admit(self, work: Work) -> bool:
        """Begin, or refuse, the next that is prepared, if memory and pace allow; whether there was one.

        One between two steps: a step reads a chunk of one prompt only.
        """
        if len(work.items) >= work.pace.allowed:
            return False
        with self._changed:
            item = self._queue.first(lambda item: item.tokens is not None)
        if item is None or not work.begin(item):
            return False
        with self._changed:
            self._queue.take(item)
        return True

    def _shut(self, error: MlxMoeError, left: list[WorkItem]) -> None:
        for item in left:
            item.tell(Failed(error))
        if self._work is not None:
            self._work.close(error)
