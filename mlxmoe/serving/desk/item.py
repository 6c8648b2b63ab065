"""An ask on its way through the desk: what is known of it by now, and who is told. Computes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mlxmoe.reply import ReplySettings
from mlxmoe.serving.desk.grammar import JSONConstraint
from mlxmoe.serving.jobs import Ask, Event, Failed, Started

logger = logging.getLogger(__name__)


class WorkItem:
    """An ask on its way: the `Job` of who submitted it. `speaks`: whether more than scores are wanted.

    `free`: whether the ask leaves open how many tokens the reply may have.
    """

    def __init__(
        self,
        ask: Ask,
        settings: ReplySettings,
        tell: Callable[[Event], None],
        *,
        speaks: bool,
        free: bool,
        place: Callable[[WorkItem], int],
    ) -> None:
        self.ask = ask
        self.settings = settings
        self.speaks = speaks
        self.free = free
        self.cancelled = False
        self.began_s = 0.0
        self.started = False  # and told so
        self.thinks = False
        self.taken = False  # to be prepared
        self.tokens: list[int] | None = None  # of the prompt, once it is prepared
        self.constraint: JSONConstraint | None = None
        self._tell = tell
        self._place = place

    @property
    def position(self) -> int:
        return self._place(self)

    def cancel(self) -> None:
        self.cancelled = True

    def start(self, started: Started) -> None:
        """Tell that its turn has come."""
        self.started = True
        self.tell(started)

    def fail(self, error: Exception) -> None:
        """Tell what is wrong with it; it is over."""
        self.tell(Failed(error))
        self.cancelled = True

    def tell(self, event: Event) -> None:
        """A listener that fails ends its own reply, and nobody else's."""
        if self.cancelled:
            return
        try:
            self._tell(event)
        except Exception:
            logger.exception("Who asked cannot be told.")
            self.cancelled = True
