"""An answer that comes from replies of the model: as a whole or as a stream, and no longer than someone waits for it.

Knows ASGI and time; what the answer says is its Shape's business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlxmoe.serving.http.flow import Replies
from mlxmoe.serving.http.problems import ApiError
from mlxmoe.serving.http.settings import ServerSettings
from mlxmoe.serving.http.wire import DONE, comment, event, to_json
from mlxmoe.serving.jobs import Ask, Desk, Failed, Spoken, Started


class Shape(Protocol):
    """What is made of the events of one request."""

    def hear(self, number: int, event: Started | Spoken) -> Iterable[dict[str, Any]]:
        """Take the next event of the reply with this number; what a stream says then."""

    def wants_more(self, number: int) -> bool:
        """Whether the rest of that reply is of any use."""

    def last(self) -> Iterable[dict[str, Any]]:
        """What a stream says when all is told."""

    def whole(self) -> dict[str, Any]:
        """All of it, for an answer without streaming."""


class Timed(Protocol):
    """Who keeps count of how long answers take."""

    def first_token(self, seconds: float) -> None: ...

    def request(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Service:
    """What every answer needs: where replies are asked for, what is allowed, and who keeps count."""

    desk: Desk
    settings: ServerSettings
    times: Timed


class Answer(Response):
    """Asks when it is sent, so that whatever ends it also ends what it asked for. What goes wrong before it begins is
    raised, to be answered with a status of its own."""

    def __init__(self, service: Service, asks: Sequence[Ask], shape: Shape, *, stream: bool) -> None:
        self.status_code = 200
        self.background = None
        self._service = service
        self._settings = service.settings
        self._asks = asks
        self._shape = shape
        self._stream = stream
        self._begin = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with Replies(self._service.desk, self._asks) as replies:
            work = asyncio.create_task(self._tell(replies, send))
            gone = asyncio.create_task(_gone(receive))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    with suppress(SlowReaderError):  # nothing more is said: the connection is closed
                        work.result()
                    self._service.times.request(time.monotonic() - self._begin)
            finally:
                replies.cancel()  # before anything is waited for
                await _ended(work, gone)

    async def _tell(self, replies: Replies, send: Send) -> None:
        headers = {"X-Queue-Position": str(replies.position)}
        if self._stream:
            await self._tell_stream(replies, headers, send)
            return
        async for _ in self._heard(replies):
            pass
        whole = to_json(self._shape.whole())
        await self._send(send, _start("application/json", {**headers, "Content-Length": str(len(whole))}))
        await self._send(send, _body(whole, more=False))

    async def _tell_stream(self, replies: Replies, headers: dict[str, str], send: Send) -> None:
        async with aclosing(self._pieces(replies)) as pieces:
            first = await anext(pieces, b"")  # whatever fails until now has a status of its own
            await self._send(send, _start("text/event-stream; charset=utf-8", headers | {"X-Accel-Buffering": "no"}))
            try:
                await self._send(send, _body(first))
                async for piece in pieces:
                    await self._send(send, _body(piece))
                end = DONE
            except SlowReaderError:
                raise
            except Exception as error:
                end = event(ApiError.of(error).body())
            await self._send(send, _body(end, more=False))

    async def _pieces(self, replies: Replies) -> AsyncGenerator[bytes, None]:
        """A stream's bytes. The first come when all replies have begun, or after a while where they have to wait."""
        first: list[bytes] | None = []
        async for said in self._heard(replies):
            piece = comment(f"queued {replies.position}") if said is None else b"".join(map(event, said))
            if first is not None:
                first.append(piece)
                waits = time.monotonic() - self._begin < self._settings.patience_s
                if said is not None and not replies.begun and waits:
                    continue
                piece, first = b"".join(first), None
            if piece:
                yield piece
        yield b"".join([*(first or ()), *map(event, self._shape.last())])

    async def _heard(self, replies: Replies) -> AsyncGenerator[list[dict[str, Any]] | None, None]:
        """What the shape says of each event; None now and then while there is none. Raises what ended a reply."""
        spoken = False
        until = self._begin + self._settings.request_s
        wait_s = self._settings.patience_s
        while not replies.ended:
            left_s = until - time.monotonic()
            heard = await replies.next(min(wait_s, left_s)) if left_s > 0 else None
            if heard is None:
                if time.monotonic() >= until:
                    raise ApiError.too_late(self._settings.request_s)
                wait_s = self._settings.comment_s
                yield None
                continue
            number, happened = heard
            if isinstance(happened, Failed):
                raise ApiError.of(happened.error)
            if isinstance(happened, Spoken) and not spoken:
                spoken = True
                self._service.times.first_token(time.monotonic() - self._begin)
            said = list(self._shape.hear(number, happened))
            if not self._shape.wants_more(number):
                replies.end(number)
            yield said

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        """Raises SlowReaderError where the client does not take it in time."""
        try:
            async with asyncio.timeout(self._settings.idle_s) as limit:
                await send(message)
        except TimeoutError as error:
            if limit.expired():
                raise SlowReaderError from error
            raise


class SlowReaderError(Exception):
    """The client has let the server wait for too long."""


async def _gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _start(content_type: str, headers: Mapping[str, str]) -> dict[str, Any]:
    lines = {"Content-Type": content_type, **headers}
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in lines.items()],
    }


def _body(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}
