"""Connections that do not outlast the server's patience: who asks nothing, or reads nothing, holds none for ever.

uvicorn waits without end for a request's head, and for a client to take the last bytes of an answer. A process has a
bounded number of files: some thousand such connections would shut everybody out. Bodies and answers under way have
bounds of their own.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

CLOSING = object()


class Connection(H11Protocol):
    """Looked at every `idle_s` seconds: closed where it was idle then too, cut where it was closed then already."""

    idle_s = 60.0
    _timer: asyncio.TimerHandle

    @classmethod
    def patient(cls, idle_s: float) -> type[Connection]:
        """For one server."""
        return type(cls.__name__, (cls,), {"idle_s": idle_s})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_later(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _look_later(self, seen: object) -> None:
        self._timer = self.loop.call_later(self.idle_s, self._look, seen)

    def _look(self, before: object) -> None:
        """`before`: how it was the last time: CLOSING, idle since this request, or something else."""
        idle = self.cycle is None or self.cycle.response_complete
        now: object = CLOSING if self.transport.is_closing() else self.cycle if idle else object()
        if now is before is CLOSING:
            self.transport.abort()
        elif now is before:
            self.timeout_keep_alive_handler()
        self._look_later(now)
