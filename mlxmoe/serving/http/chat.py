"""/v1/chat/completions: from messages to Asks, and from replies to messages, whole or as chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from mlxmoe.serving.http.forced import ForcedCall, forced_tools, schema_of
from mlxmoe.serving.http.parts import Part, PartSplitter, ToolCall
from mlxmoe.serving.http.problems import ApiError
from mlxmoe.serving.http.schemas import (
    AssistantMessage,
    CalledTool,
    ChatRequest,
    Content,
    Message,
    SystemMessage,
    Tool,
    ToolMessage,
)
from mlxmoe.serving.http.shaping import (
    Choices,
    Heading,
    Terms,
    Usage,
    check_model,
    choices_of,
    ending_of,
    is_said,
    logprob_of,
    options_of,
)
from mlxmoe.serving.jobs import Ask, ModelFacts, Spoken, Started

NO_PARAMETERS = {"type": "object", "properties": {}}


def chat_asks(request: ChatRequest, facts: ModelFacts, terms: Terms) -> list[Ask]:
    """Raises an ApiError for what this model or this server cannot do."""
    check_model(request.model, facts)
    terms.check(request)
    tools, forced = tools_of(request), forced_tools(request)
    if tools and (facts.tool_calls is None or facts.parse_tool_call is None):
        raise ApiError(
            400, f"{facts.name} has no way to call tools. Leave tools out.", param="tools", code="unsupported"
        )
    if tools and request.wanted_schema is not None:
        raise ApiError(
            400,
            "A reply that has to be JSON calls no tools. Leave out response_format, or set tool_choice to 'none'.",
            param="response_format",
            code="unsupported",
        )
    template: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        template["reasoning_effort"] = request.reasoning_effort
    ask = Ask(
        prompt=[message_of(message) for message in request.messages],
        options=options_of(request, request.most_tokens, request.top_logprobs),
        tools=tools or None,
        template=template,
        token_texts=request.with_logprobs,
        json_schema=schema_of(forced) if forced else request.wanted_schema,
        client=terms.client,
    )
    return choices_of(ask, request.choices)


def tools_of(request: ChatRequest) -> list[dict[str, Any]]:
    """As chat templates take them; none where none may be called."""
    return [] if request.tool_choice == "none" else [_tool_of(tool) for tool in request.tools or ()]


def _tool_of(tool: Tool) -> dict[str, Any]:
    function = {"parameters": NO_PARAMETERS, **tool.function.model_dump(exclude_none=True)}
    return {"type": "function", "function": {"name": function.pop("name"), **function}}


def message_of(message: Message) -> dict[str, Any]:
    """As chat templates take it: text, and the arguments of calls as what they say."""
    told: dict[str, Any] = {"role": message.role, "content": _text_of(message.content)}
    if message.name is not None:
        told["name"] = message.name
    match message:
        case SystemMessage():
            told["role"] = "system"  # templates know no developer
        case AssistantMessage(reasoning_content=reasoning, tool_calls=calls):
            if reasoning:
                told["reasoning_content"] = reasoning
            if calls:
                told["tool_calls"] = [_call_of(call) for call in calls]
        case ToolMessage(tool_call_id=str(number)):
            told["tool_call_id"] = number
    return told


def _text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _call_of(call: CalledTool) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):  # a client's text: the template may know what to do with it
        parsed = None
    if isinstance(parsed, dict):
        arguments = parsed
    told: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return told if call.id is None else {"id": call.id, **told}


def chat_shape(request: ChatRequest, facts: ModelFacts) -> Choices:
    """Replies as `chat.completion`, or as its chunks."""
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    choices = [_Choice(number, request, facts) for number in range(request.choices)]
    return Choices(Heading.new("chatcmpl", kind, facts), choices, 1, tell_usage=request.with_usage)


class _Choice:
    """One reply."""

    def __init__(self, index: int, request: ChatRequest, facts: ModelFacts) -> None:
        self.usage = Usage()
        self._ending: dict[str, Any] | None = None
        self._index = index
        self._facts = facts
        self._tools = tools_of(request)
        self._one_call = request.parallel_tool_calls is False
        forced = forced_tools(request)
        self._forced = ForcedCall(forced) if forced else None
        self._marked = None if forced else self._tools  # the tools whose calls the model marks as its own
        self._parts = PartSplitter(facts, tools=self._marked)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] | None = [] if request.with_logprobs else None
        self._told = 0  # how many of the log-probabilities a stream has told

    @property
    def ended(self) -> bool:
        return self._ending is not None

    def begin(self, started: Started) -> Iterator[dict[str, Any]]:
        self.usage.begin(started)
        self._parts = PartSplitter(self._facts, thinks=started.thinks, tools=self._marked)
        yield self._piece({"role": "assistant", "content": ""})

    def speak(self, spoken: Spoken) -> Iterator[dict[str, Any]]:
        chunk = spoken.chunk
        self.usage.count(spoken, reasoning=self._parts.kind == "reasoning")
        if self._logprobs is not None and is_said(spoken):
            top = [logprob_of(text, logprob) for text, logprob in spoken.top]
            self._logprobs.append({**logprob_of(spoken.token_text, chunk.logprob), "top_logprobs": top})
        parts = self._parts.add(chunk.text)
        if chunk.finish_reason is not None:
            parts += self._parts.finish(cut=chunk.finish_reason != "stop")
        if self._forced is not None:
            parts = self._forced.take(parts, last=chunk.finish_reason is not None)
        for part in self._wanted(parts):
            yield self._piece(self._keep(part))
        ended_by_call = self._one_call and bool(self._calls)
        if chunk.finish_reason is None and not ended_by_call:
            return
        self._ending = ending_of(chunk.finish_reason or "stop")
        if self._calls and self._ending["finish_reason"] == "stop":
            self._ending["finish_reason"] = "tool_calls"
        yield self._piece({}, **self._ending)

    def whole(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "refusal": None,
            "annotations": [],
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in self._calls
            ]
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        return {"index": self._index, "message": message, "logprobs": logprobs, **(self._ending or ending_of("stop"))}

    def _wanted(self, parts: Sequence[Part]) -> Sequence[Part]:
        """`parts`, up to the first call where only one is wanted."""
        if self._one_call:
            for number, part in enumerate(parts):
                if isinstance(part, ToolCall):
                    return parts[: number + 1]
        return parts

    def _keep(self, part: Part) -> dict[str, Any]:
        """Note `part`; as a delta."""
        if isinstance(part, ToolCall):
            function = {"name": part.name, "arguments": part.arguments}
            call = {"index": len(self._calls), "id": part.id, "type": "function", "function": function}
            self._calls.append(call)
            return {"tool_calls": [call]}
        kind, text = part
        if kind == "reasoning":
            self._reasoning.append(text)
            return {"reasoning_content": text}
        self._content.append(text)
        return {"content": text}

    def _piece(self, delta: dict[str, Any], **ending: Any) -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None and len(self._logprobs) > self._told:
            logprobs = {"content": self._logprobs[self._told :], "refusal": None}
            self._told = len(self._logprobs)
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None, **ending}
