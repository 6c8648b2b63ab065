"""What answers look like, for /openapi.json. Answers are not made from it: tests hold them to it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorFields


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class CalledFunction(BaseModel):
    name: str
    arguments: str


class Call(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Reply(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    annotations: list[dict[str, Any]]
    tool_calls: list[Call] | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: Reply
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    mlxmoe: dict[str, str] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    mlxmoe: dict[str, str] | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelFacts(BaseModel):
    context: int | None
    has_chat_template: bool
    reasoning: bool
    tools: bool


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    mlxmoe: ModelFacts


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    status: str
    state: str
    accepts: bool
    reason: str
    pressure: Literal["normal", "warning", "critical"]
    queued: int
    active: int


class Panel(BaseModel):
    """All of Status; its other fields are those of the Python API."""

    model: dict[str, Any]
    state: str
    accepts: bool
    queued: int
    active: int
    tokens_per_s: float
    memory: dict[str, Any] | None
    stats: dict[str, Any] | None
    heat: list[list[float | None]]
    resident: list[list[bool]]


_REFUSALS = {
    400: "What was asked makes no sense, or does not fit.",
    401: "No key, or a wrong one.",
    403: "A page of another server asks.",
    404: "There is no such thing here.",
    408: "The body did not come.",
    413: "The body is too long.",
    421: "Another host name than this server answers to.",
    429: "As many wait as the server takes on; Retry-After says when to ask again.",
    500: "The server failed.",
    503: "No new requests now; Retry-After says when to ask again, where that is known.",
    504: "It took too long.",
}


def of(kind: type[BaseModel], unavailable: type[BaseModel] = Error, *, stream: bool = False) -> dict[str, Any]:
    """A route's arguments: its answer is `kind` in JSON, or a stream; all else is an Error."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": Error, "description": text} for status, text in _REFUSALS.items()
    }
    responses[503]["model"] = unavailable
    # FastAPI itself would say that a wrong body is a 422 of its own form.
    responses["4XX"] = {"model": Error, "description": "Refused."}
    responses[200] = {
        "model": kind,
        "description": "The whole, or a stream of events where asked for.",
    }
    if stream:
        responses[200]["content"] = {"text/event-stream": {}}
    return {"response_model": None, "responses": responses}


def of_text(content_type: str) -> dict[str, Any]:
    arguments = of(Error)
    arguments["responses"][200] = {
        "description": "Text.",
        "content": {content_type.partition(";")[0]: {"schema": {"type": "string"}}},
    }
    return arguments
