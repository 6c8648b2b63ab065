"""The app: which path is whose, and how errors leave it. Holds no state beside the desk's."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mlxmoe.errors import MlxMoeError
from mlxmoe.serving.http import replies_schema as told
from mlxmoe.serving.http.answer import Answer, Service
from mlxmoe.serving.http.chat import chat_asks, chat_shape
from mlxmoe.serving.http.completions import completion_asks, completion_shape
from mlxmoe.serving.http.connections import Connection
from mlxmoe.serving.http.files import page_files
from mlxmoe.serving.http.gate import Gate, client_of
from mlxmoe.serving.http.metrics import CONTENT_TYPE, Metrics
from mlxmoe.serving.http.problems import ApiError
from mlxmoe.serving.http.schemas import ChatRequest, CompletionRequest
from mlxmoe.serving.http.settings import ServerSettings
from mlxmoe.serving.http.shaping import Terms
from mlxmoe.serving.http.watch import health, panel
from mlxmoe.serving.http.wire import to_json
from mlxmoe.serving.jobs import Desk, ModelFacts

# Paths of OpenAI's API that clients know, and what to do instead.
UNSUPPORTED = {
    "/v1/embeddings": "This server makes no embeddings: its model only writes text.",
    "/v1/responses": "The responses API is not supported. Use /v1/chat/completions.",
    "/v1/moderations": "This server moderates nothing.",
    "/v1/images/generations": "This server makes no images.",
    "/v1/audio/speech": "This server makes no audio.",
    "/v1/audio/transcriptions": "This server takes no audio.",
    "/v1/assistants": "Assistants are not supported. Use /v1/chat/completions.",
    "/v1/files": "This server keeps no files.",
    "/v1/batches": "This server takes no batches of files. Send the requests at once: it batches them itself.",
}

LAST_WORDS_S = 5.0  # for clients to hear how their replies ended


def create_app(desk: Desk, settings: ServerSettings) -> FastAPI:
    """The whole of HTTP over `desk`. Nothing is shared between two apps."""
    metrics = Metrics(desk)
    pages = page_files()
    app = FastAPI(title="mlxmoe", summary="An OpenAI-compatible server.", docs_url=None, redoc_url=None)
    app.include_router(_replies(Service(desk, settings, metrics)))
    app.include_router(_models(desk))
    app.include_router(_unsupported())
    app.include_router(_watching(desk, metrics))
    for path, file in pages.items():
        app.add_route(path, file.answer, methods=["GET"], include_in_schema=False)
    for kind in (ApiError, MlxMoeError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _tell_problem)
    app.add_middleware(
        Gate, settings=settings, open_paths={"/", "/health", *pages}, observe=metrics.observe
    )  # outermost but for Starlette's own, which it leaves nothing to do
    return app


class Listener(uvicorn.Server):
    """Listens for `app` on what `settings` say, or on the sockets that `run` is given, until a signal ends it.

    `on_listening`: called when connections are taken. `end(drain_s)`: ends the replies under way, those that can
    within `drain_s` seconds of themselves; called by another thread when the server is to end, and with 0 when it is
    to end at once.
    """

    def __init__(
        self,
        app: FastAPI,
        settings: ServerSettings,
        *,
        on_listening: Callable[[], None] = lambda: None,
        end: Callable[[float], None] = lambda drain_s: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=Connection.patient(settings.idle_s),
                log_config=None,
                lifespan="off",  # the app has nothing to set up, and a second Ctrl-C would show a traceback of it
                access_log=False,
                server_header=False,
                proxy_headers=False,  # a header that anyone can send must not say who a client is
                timeout_graceful_shutdown=math.ceil(settings.drain_s + LAST_WORDS_S),
            )
        )
        self._drain_s = settings.drain_s
        self._on_listening = on_listening
        self._end = end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.gather(asyncio.to_thread(self._end, self._drain_s), super().shutdown(sockets))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self.force_exit:  # the second Ctrl-C
            threading.Thread(target=self._end, args=(0.0,), daemon=True).start()


def _replies(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1")
    desk, settings = service.desk, service.settings

    def terms(request: Request) -> Terms:
        return Terms(client_of(request.scope), settings.max_n)

    @router.post("/chat/completions", **told.of(told.ChatCompletion, stream=True))
    async def chat(request: Request, body: ChatRequest) -> Response:
        asks, shape = chat_asks(body, desk.model, terms(request)), chat_shape(body, desk.model)
        return Answer(service, asks, shape, stream=bool(body.stream))

    @router.post("/completions", **told.of(told.Completion, stream=True))
    async def completions(request: Request, body: CompletionRequest) -> Response:
        asks, shape = completion_asks(body, desk.model, terms(request)), completion_shape(body, desk.model)
        return Answer(service, asks, shape, stream=bool(body.stream))

    return router


def _models(desk: Desk) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/models", **told.of(told.ModelList))
    async def models() -> Response:
        return _json({"object": "list", "data": [_card(desk.model)]})

    @router.get("/models/{model_id:path}", **told.of(told.ModelCard))
    async def model(model_id: str) -> Response:
        if model_id != desk.model.name:
            raise ApiError(404, f"No model {model_id[:200]!r} is served here.", param="model", code="model_not_found")
        return _json(_card(desk.model))

    return router


def _unsupported() -> APIRouter:
    router = APIRouter()
    for path, hint in UNSUPPORTED.items():

        async def refuse(hint: str = hint) -> Response:
            # Not 501: clients take all from 500 on for a failure that may pass, and ask again.
            raise ApiError(404, hint, code="unsupported_endpoint")

        router.add_api_route(path, refuse, methods=["GET", "POST"], include_in_schema=False)
    return router


def _watching(desk: Desk, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/health", **told.of(told.Health, told.Health))
    def healthy() -> Response:
        code, body = health(desk)
        return _json(body, code)

    @router.get("/api/status", **told.of(told.Panel))
    def status(heat: Annotated[bool, Query()] = False) -> Response:
        return _json(panel(desk, heat=heat))

    @router.get("/metrics", **told.of_text(CONTENT_TYPE))
    def measured() -> Response:
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    return router


def _card(facts: ModelFacts) -> dict[str, Any]:
    return {
        "id": facts.name,
        "object": "model",
        "created": facts.created,
        "owned_by": "mlxmoe",
        "mlxmoe": {
            "context": facts.context,
            "has_chat_template": facts.has_chat_template,
            "reasoning": facts.reasoning is not None,
            "tools": facts.tool_calls is not None,
        },
    }


async def _tell_problem(request: Request, error: Exception) -> Response:
    match error:
        case RequestValidationError():
            return ApiError.of_validation(error.errors()).response()
        case HTTPException():
            return _of_http(request, error).response()
    return ApiError.of(error).response()


def _of_http(request: Request, error: HTTPException) -> ApiError:
    """What Starlette and FastAPI refuse by themselves."""
    path = request.url.path
    match error.status_code:
        case 404:
            message, code = f"There is nothing at {path[:200]}.", "not_found"
        case 405:
            message, code = f"{request.method} is not allowed for {path[:200]}.", "method_not_allowed"
        case 400:
            message, code = "The body cannot be read.", "invalid_body"
        case 413:
            message, code = error.detail, "request_too_large"
        case _:
            message, code = error.detail, "http_error"
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def _json(body: Any, status: int = 200) -> Response:
    return Response(to_json(body), status, media_type="application/json")
