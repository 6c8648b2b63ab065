"""A call of a tool that has to be made: which form holds the reply to it, and the call in what was said.

One tool: the reply is its arguments. Several: an object of the tool's name and its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxmoe.serving.http.parts import Part, ToolCall
from mlxmoe.serving.http.problems import ApiError
from mlxmoe.serving.http.schemas import ChatRequest, NamedChoice, Tool

COMBINED = frozenset(("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties"))  # may add properties
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def forced_tools(request: ChatRequest) -> list[Tool]:
    """Those of which one has to be called; none where the model may choose. Raises an ApiError for what is none."""
    tools = request.tools or []
    match request.tool_choice:
        case "required":
            wanted = tools
        case NamedChoice(function=named):
            wanted = [tool for tool in tools if tool.function.name == named.name][:1]
        case _:
            return []
    if not wanted:
        raise ApiError(
            400,
            "tool_choice wants a call of a tool that tools does not have.",
            param="tool_choice",
            code="invalid_value",
        )
    return wanted


def schema_of(tools: Sequence[Tool]) -> Mapping[str, Any]:
    """What a reply has to be that calls one of them."""
    if len(tools) == 1:
        return _arguments_of(tools[0])
    calls = [{"name": {"const": tool.function.name}, "arguments": _arguments_of(tool)} for tool in tools]
    fixed = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
    return {"anyOf": [{**fixed, "properties": call} for call in calls]}


def _arguments_of(tool: Tool) -> Mapping[str, Any]:
    parameters = tool.function.parameters
    if parameters is None:
        return NO_ARGUMENTS
    # Arguments that nobody described help nobody, and a small model finds no end of them.
    closed = {} if "properties" not in parameters or COMBINED & parameters.keys() else {"additionalProperties": False}
    return {"type": "object", **closed, **parameters}


class ForcedCall:
    """Makes the call from the parts of a reply that was held to `schema_of(tools)`."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._said = ""

    def take(self, parts: Sequence[Part], *, last: bool) -> list[Part]:
        """`parts` without the content, which the `last` time is a call; text where it was cut off."""
        given: list[Part] = []
        for part in parts:
            if not isinstance(part, ToolCall) and part[0] == "content":
                self._said += part[1]
            else:
                given.append(part)
        if last:
            given.append(self._call())
        return given

    def _call(self) -> Part:
        try:
            said = json.loads(self._said)
        except (ValueError, RecursionError):
            return ("content", self._said)
        if len(self._tools) == 1:
            return ToolCall.new(self._tools[0].function.name, said)
        return ToolCall.new(said["name"], said["arguments"])
