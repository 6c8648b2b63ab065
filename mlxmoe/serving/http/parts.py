"""The parts of a reply: what is said, what is only thought, and calls of tools, by the marks that the model sets.

Works on text as it comes, in pieces of any size. Knows neither HTTP nor tokens.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxmoe.errors import brief
from mlxmoe.serving.jobs import ModelFacts
from mlxmoe.text import length_of_possible_stop

logger = logging.getLogger(__name__)

Kind = Literal["content", "reasoning", "call"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: JSON, as OpenAI gives it."""

    id: str
    name: str
    arguments: str

    @classmethod
    def new(cls, name: str, arguments: Any) -> ToolCall:
        """`arguments`: what they say, or already JSON."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return cls(f"call_{secrets.token_hex(12)}", name, text)


Part = tuple[Literal["content", "reasoning"], str] | ToolCall


class PartSplitter:
    """Splits one reply.

    `thinks`: whether it begins within the model's reasoning. `tools`: those that may be called; None leaves what
    looks like a call in the content. White space beside a mark is the mark's. A call that cannot be read, or is cut
    off, is content with its marks: nothing is lost.
    """

    def __init__(
        self, facts: ModelFacts, *, thinks: bool = False, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._tools = tools
        self._parse = facts.parse_tool_call
        self._reasoning = facts.reasoning
        calls = bool(tools) and facts.tool_calls is not None and self._parse is not None
        self._calls = facts.tool_calls if calls else None
        self._kind: Kind = "reasoning" if thinks and facts.reasoning else "content"
        self._after_mark = self._kind == "reasoning"
        self._held = ""
        self._call = ""

    @property
    def kind(self) -> Kind:
        """What the text is that comes now."""
        return self._kind

    def add(self, text: str) -> list[Part]:
        """What is known for certain now that `text` has come."""
        self._held += text
        parts: list[Part] = []
        while (found := self._first_mark()) is not None:
            start, mark, kind = found
            before, self._held = self._held[:start], self._held[start + len(mark) :]
            self._give(before, parts)
            if self._kind == "call":
                self._end_call(parts)
            self._kind, self._after_mark = kind, True
        keep = length_of_possible_stop(self._held, [mark for mark, _ in self._marks()])
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._give(ready, parts)
        return parts

    def finish(self, *, cut: bool) -> list[Part]:
        """The rest. `cut`: the reply was ended by a limit, not by the model."""
        parts: list[Part] = []
        self._give(self._held, parts)
        self._held = ""
        if self._kind == "call":
            assert self._calls is not None, "within a call, so there are marks of calls"
            if cut and self._calls[1]:
                parts.append(("content", self._calls[0] + self._call))
            else:
                self._end_call(parts, ended=False)
            self._call = ""
            self._kind = "content"
        return parts

    def _marks(self) -> list[tuple[str, Kind]]:
        """The marks that mean something now, and what comes after them."""
        if self._kind == "reasoning":
            return [] if self._reasoning is None else [(self._reasoning[1], "content")]
        if self._kind == "call":
            end = "" if self._calls is None else self._calls[1]
            return [(end, "content")] if end else []  # some models' calls go on to the end of the text
        marks: list[tuple[str, Kind]] = []
        if self._reasoning is not None:
            marks.append((self._reasoning[0], "reasoning"))
        if self._calls is not None:
            marks.append((self._calls[0], "call"))
        return marks

    def _first_mark(self) -> tuple[int, str, Kind] | None:
        found = [(self._held.find(mark), mark, kind) for mark, kind in self._marks()]
        return min((mark for mark in found if mark[0] >= 0), default=None)

    def _give(self, text: str, parts: list[Part]) -> None:
        if self._kind == "call":
            self._call += text
            return
        if self._after_mark:
            text = text.lstrip()
        if text:
            self._after_mark = False
            parts.append((self._kind, text))

    def _end_call(self, parts: list[Part], *, ended: bool = True) -> None:
        assert self._calls is not None, "within a call, so there are marks of calls"
        assert self._parse is not None, "without a parser no marks of calls are looked for"
        text, self._call = self._call, ""
        try:
            parts += _as_calls(self._parse(text, self._tools))
        except Exception as error:  # a model may write anything, and its parser may trip over it in any way
            logger.info("A call of a tool cannot be read, it is given as text: %s", brief(error))
            parts.append(("content", self._calls[0] + text + (self._calls[1] if ended else "")))


def _as_calls(parsed: Any) -> list[ToolCall]:
    """From what mlx-lm's parsers give. Raises ValueError where that is no call."""
    calls = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        name, arguments = call["name"], call.get("arguments", {})
        if not isinstance(name, str) or not name:
            raise ValueError("the call has no name")
        calls.append(ToolCall.new(name, arguments))
    if not calls:
        raise ValueError("there is no call in it")
    return calls
