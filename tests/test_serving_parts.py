"""Reasoning, content and calls are told apart however the text is cut, and no text is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fake_desk import FACTS
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.serving.http.parts import Part, PartSplitter, ToolCall

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Jena"}}</tool_call>'


def split(pieces: list[str], *, cut: bool = False, **more: Any) -> list[Part]:
    splitter = PartSplitter(more.pop("facts", FACTS), **{"tools": TOOLS, **more})
    parts = [part for piece in pieces for part in splitter.add(piece)]
    return parts + splitter.finish(cut=cut)


def joined(parts: list[Part]) -> list[tuple[str, str]]:
    """Neighbours of one kind together; calls as (name, arguments)."""
    told: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            told.append((part.name, part.arguments))
        elif told and told[-1][0] == part[0]:
            told[-1] = (part[0], told[-1][1] + part[1])
        else:
            told.append(part)
    return told


def test_reasoning_is_told_apart_from_content() -> None:
    parts = joined(split(["<think>\nHm, so.</think>\n\nYes."]))
    assert parts == [("reasoning", "Hm, so."), ("content", "Yes.")]


def test_a_reply_may_begin_within_reasoning() -> None:
    assert joined(split(["so be it</think>Yes"], thinks=True)) == [("reasoning", "so be it"), ("content", "Yes")]


def test_an_end_of_reasoning_that_never_began_is_text() -> None:
    assert joined(split(["a</think>b"])) == [("content", "a</think>b")]


@given(st.data())
def test_parts_do_not_depend_on_how_the_text_is_cut(data: st.DataObject) -> None:
    text = "<think>I < 3 </thin king</think> Let me <tool see. " + CALL + "\n" + CALL + " Done <think"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert joined(split(pieces)) == [
        ("reasoning", "I < 3 </thin king"),
        ("content", "Let me <tool see. "),
        ("weather", '{"city": "Jena"}'),
        ("weather", '{"city": "Jena"}'),
        ("content", "Done <think"),
    ]


@given(st.text("<>/tool_calhink {}x\n", max_size=60), st.booleans())
def test_no_text_is_lost_whatever_the_model_writes(text: str, cut: bool) -> None:
    told = "".join(part[1] for part in joined(split(list(text), cut=cut)))
    for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        text, told = text.replace(mark, ""), told.replace(mark, "")
    assert "".join(told.split()) == "".join(text.split())


@pytest.mark.parametrize("broken", ["{not json", '{"arguments": {}}', "[]", '"weather"'])
def test_a_call_that_cannot_be_read_is_content(broken: str) -> None:
    text = f"See: <tool_call>{broken}</tool_call> so"
    assert "".join(part[1] for part in joined(split(list(text)))).replace(" ", "") == text.replace(" ", "")


def test_a_call_that_is_cut_off_is_content() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {}}'
    assert joined(split([text], cut=True)) == [("content", text)]
    assert joined(split([text], cut=False)) == [("weather", "{}")], "the model ended it without the mark"


def test_calls_of_some_models_go_on_to_the_end_of_the_text() -> None:
    facts = replace(
        FACTS,
        tool_calls=("[TOOL_CALLS]", ""),
        parse_tool_call=lambda text, tools: [{"name": name, "arguments": {}} for name in text.split()],
    )
    assert joined(split(["So [TOOL", "_CALLS]a b"], facts=facts)) == [("content", "So "), ("a", "{}"), ("b", "{}")]


def test_without_tools_a_call_is_text() -> None:
    assert joined(split([CALL], tools=None)) == [("content", CALL)]


def test_calls_have_ids_of_their_own_and_json_arguments() -> None:
    first, second = split([CALL, CALL])
    assert isinstance(first, ToolCall)
    assert isinstance(second, ToolCall)
    assert first.id != second.id
    assert first.id.startswith("call_")
    assert json.loads(first.arguments) == {"city": "Jena"}
