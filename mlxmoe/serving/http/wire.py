"""How values are written to the wire: JSON and server-sent events. Knows neither requests nor models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

LEAST_LOGPROB = -9999.0  # OpenAI's word for what cannot be: JSON has no infinity

DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    """UTF-8. A lone surrogate, which a model may write as an escape, becomes that escape again."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def comment(text: str) -> bytes:
    """What clients pass over, and proxies see."""
    return f": {text}\n\n".encode()


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def plain(value: Any, text: Callable[[str], str] = str) -> Any:
    """`value` with only what JSON has: no NaN and no infinity, keys that are strings. `text` is put over strings."""
    match value:
        case str():
            return text(value)
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): plain(item, text) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item, text) for item in value]
        case None | bool() | int():
            return value
    return text(str(value))
