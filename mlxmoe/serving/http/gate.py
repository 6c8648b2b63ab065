"""What every request passes first, before anything is made of it: host, origin, key, size and time of its body.

Plain ASGI: what it wraps may stream, and hears at once that a client has left. It is also what no error gets past.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxmoe.serving.http.problems import ApiError
from mlxmoe.serving.http.settings import ServerSettings, bare_host

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "X-Frame-Options": "DENY",
}
ALL_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

Observe = Callable[[Scope, int, float], None]  # told of each answer: its scope, status and seconds


class Gate:
    """`open_paths`: what is answered without a key. `observe`: told of every answer."""

    def __init__(
        self, app: ASGIApp, *, settings: ServerSettings, open_paths: Collection[str], observe: Observe
    ) -> None:
        self._app = app
        self._settings = settings
        self._open = frozenset(open_paths)
        self._keys = [key.encode() for key in settings.api_keys]
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:  # no route takes a web socket: nothing to gain, and nothing to guard
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, status = time.monotonic(), 0
        headers = Headers(scope=scope)

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(MutableHeaders(scope=message), scope, headers)
            await send(message)

        try:
            refused = self._refuse(scope, headers)
            if refused is not None:
                await refused(scope, receive, send_on)
            else:
                await self._app(scope, self._bounded(receive), send_on)
        except Exception as error:
            problem = ApiError.unknown(error)  # noted in the log, also where it is too late to tell
            if status == 0:
                await problem.response()(scope, receive, send_on)
        finally:
            self._observe(scope, status, time.monotonic() - begin)

    def _refuse(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer to what goes no further."""
        try:
            self._check_host(headers)
            origin = self._check_origin(scope, headers)
            if origin and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                return Response(status_code=204, headers=_preflight(headers))
            if scope["path"] not in self._open:
                self._check_key(scope, headers)
            self._check_length(headers)
        except ApiError as problem:
            return problem.response()
        return None

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._settings.answers_to(bare_host(hosts[0])):
            raise ApiError(
                421,
                "This server does not answer under that host name. Its operator can allow it.",
                code="host_not_allowed",
            )

    def _check_origin(self, scope: Scope, headers: Headers) -> bool:
        """Whether the request comes from a page of another server, which is allowed. ApiError where it is not, and
        could do something: that the page cannot read the answer would not keep it from being worked on."""
        origin = headers.get("origin")
        if origin is None or origin.partition("://")[2].lower() == headers["host"].lower():
            return False
        if not {"*", origin} & set(self._settings.allowed_origins):
            if scope["method"] in SAFE_METHODS:
                return False
            raise ApiError(403, "This server takes no requests from other servers' pages.", code="origin_not_allowed")
        return True

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""
        same = [hmac.compare_digest(key, known) for known in self._keys]  # against all: none is found sooner
        if any(same):
            scope["mlxmoe.key"] = same.index(True)
        else:
            raise ApiError(
                401,
                "Incorrect API key provided. Send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            raise ApiError(400, "Content-Length is no number.", code="invalid_header")
        if len(length) > 18 or int(length) > self._settings.max_body_bytes:
            raise ApiError(413, self._too_long(), code="request_too_large", headers={"Connection": "close"})

    def _bounded(self, receive: Receive) -> Receive:
        """`receive`, as long as the body is neither too long nor too slow."""
        got, whole = 0, False
        until = asyncio.get_running_loop().time() + self._settings.idle_s

        async def receive_body() -> Message:
            nonlocal got, whole
            if whole:  # what comes now is that the client leaves, whenever it likes
                return await receive()
            try:
                async with asyncio.timeout_at(until):  # of the whole: it may not drip
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "The body of the request did not come.") from None
            got += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if got > self._settings.max_body_bytes:
                raise HTTPException(413, self._too_long(), {"Connection": "close"})
            return message

        return receive_body

    def _too_long(self) -> str:
        return f"The body is longer than this server takes: {self._settings.max_body_bytes} bytes."

    def _add_headers(self, answer: MutableHeaders, scope: Scope, headers: Headers) -> None:
        page = not scope["path"].startswith(("/v1/", "/api/"))
        for name, value in (ALL_HEADERS | PAGE_HEADERS if page else ALL_HEADERS).items():
            answer.setdefault(name, value)
        answer.setdefault("Cache-Control", "no-store")
        origins = self._settings.allowed_origins
        if origins:
            answer.add_vary_header("Origin")
            origin = headers.get("origin")
            if origin and ("*" in origins or origin in origins):
                answer["Access-Control-Allow-Origin"] = origin
                answer["Access-Control-Expose-Headers"] = "Retry-After, X-Queue-Position"


def _preflight(headers: Headers) -> dict[str, str]:
    wanted = headers.get("access-control-request-headers", "")
    return {
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": wanted or "authorization, content-type",
        "Access-Control-Max-Age": "600",
    }


def client_of(scope: Scope) -> str:
    """Whose request it is, where several wait for their turn: the address, with the key where there is one.

    What a client says of itself (`user`) does not count: it would be many clients as soon as that helped.
    """
    address = (scope.get("client") or ("", 0))[0]
    return f"{address} {scope.get('mlxmoe.key', '')}"
