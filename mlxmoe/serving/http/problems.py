"""What goes wrong, as HTTP tells it: a status, and OpenAI's form of an error. Lets no path and no trace out."""

from __future__ import annotations

import logging
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from mlxmoe.errors import (
    ContextError,
    EngineClosedError,
    MemoryBudgetError,
    MemoryPressureError,
    QueueFullError,
    RequestError,
)
from mlxmoe.serving.http.wire import to_json

logger = logging.getLogger(__name__)

MOST_MESSAGE = 2000  # characters
MOST_PARAM = 200
MISSING = "missing_required_parameter"
RETRY_S = 10  # when the machine may have memory again
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_TAGS = ("system", "developer", "user", "assistant", "tool", "text", "json_object", "json_schema")
# From the first path on a line, or within quotes, to the last slash's name: a folder's name may have spaces.
_PATH = re.compile(r"(?<![\w.)/\\])(?:~|[A-Za-z]:|file:/)?[/\\](?=\S)(?:[^\n\"'`]*[/\\])?[^\s\"'`/\\]*")


class ApiError(Exception):
    """An answer that is an error. `message` is for the client: it names the thing, the numbers and the next step."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:MOST_MESSAGE]  # it may repeat what the client sent
        self.param = param and param[:MOST_PARAM]
        self.code = code
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """What a client is told of `error`; what it is not told goes to the log, under an id that it is told."""
        match error:
            case ApiError():
                return error
            case QueueFullError():
                return cls(429, without_paths(error), code="queue_full", headers=retry_after(error.retry_after_s))
            case MemoryPressureError():
                return cls(503, without_paths(error), code="memory_pressure", headers=retry_after(RETRY_S))
            case EngineClosedError():
                return cls(503, without_paths(error), code="closing", headers=retry_after(RETRY_S))
            case MemoryBudgetError() | ContextError():  # the desk waits for memory that others will give back
                return cls(400, without_paths(error), code="context_length_exceeded")
            case RequestError():
                return cls(400, without_paths(error), code="invalid_value")
            case TimeoutError():
                return cls.too_late()
        return cls.unknown(error)

    @classmethod
    def unknown(cls, error: BaseException) -> ApiError:
        """For what nobody foresaw."""
        number = secrets.token_hex(6)
        logger.error("Error %s", number, exc_info=error)
        return cls(500, f"The server failed. Its log has the reason under {number}.", code="internal_error")

    @classmethod
    def too_late(cls, limit_s: float | None = None) -> ApiError:
        limit = "" if limit_s is None else f" of {limit_s:g} seconds"
        return cls(504, f"The reply took longer than the limit{limit}. Ask for fewer tokens.", code="timeout")

    @classmethod
    def of_validation(cls, errors: Sequence[Mapping[str, Any]]) -> ApiError:
        """From pydantic's errors: the first that says most, by the field that it is about."""
        error = max(errors, key=_says)
        if error["type"] == "json_invalid":
            return cls(400, "The body is no valid JSON.", code="invalid_json")
        param = _param_of(error["loc"][1:])
        code = MISSING if error["type"] == "missing" else "invalid_value"
        hint = " Give the name that /v1/models tells, or 'default'." if (param, code) == ("model", MISSING) else ""
        subject = param or "The body (sent as application/json)"
        return cls(400, f"{subject}: {error['msg']}.".replace("..", ".") + hint, param=param, code=code)

    def body(self) -> dict[str, Any]:
        """OpenAI's form."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(to_json(self.body()), self.status, self.headers, "application/json")


def without_paths(message: object) -> str:
    """On one line, with no folder or file of this machine in it."""
    # Cut before it is looked at: it may repeat a prompt, and the search takes the square of a line's length.
    return " ".join(_PATH.sub("(a path)", str(message)[:MOST_MESSAGE]).split())


def retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(min(seconds, 3600.0))))}


def _param_of(place: Sequence[int | str]) -> str | None:
    """The field that pydantic's location leads to, without the members of unions on the way."""
    names: list[str] = []
    for number, part in enumerate(place):
        before = place[number - 1] if number else None
        tag = before == "response_format" or (isinstance(before, int) and number == 2)  # messages.0.user.content
        if isinstance(part, int) or not ((tag and part in _TAGS) or _is_variant(part)):
            names.append(str(part))
    return ".".join(names) or None


def _is_variant(part: str) -> bool:
    """Whether it is a type, as pydantic names the members of unions, and no field."""
    types = ("str", "int", "float", "bool", "list", "none")
    return "[" in part or part.startswith(("constrained-", "function-")) or part[:1].isupper() or part in types


def _says(error: Mapping[str, Any]) -> tuple[float, bool]:
    """How much one of pydantic's errors says; least, that a value is not of one type of several that it may be of."""
    kind = error["type"]
    return math.inf if kind == "json_invalid" else len(error["loc"]), not kind.endswith("_type")
