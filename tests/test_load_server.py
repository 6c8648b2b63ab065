"""The server under load, by the tool that measures it: every word compared, nothing left over."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest
from conftest import TOOLS, run_tool


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("load_server")


def test_a_difference_is_found_and_a_level_choice_is_not_one(tool: Any) -> None:
    known = tool.Known("p", ("a", "b", "c"), (1.0, 1e-6, 1.0))
    assert tool.difference(["a", "b", "c"], known, 3) == ""
    assert tool.difference(["a", "b"], known, 2) == ""
    assert tool.difference(["a", "x", "y"], known, 3) == ""  # where the best two were as good as level
    assert "'p'" in tool.difference(["x", "b", "c"], known, 3)
    assert "2 tokens and not 3" in tool.difference(["a", "b"], known, 3)


def test_memory_that_is_kept_is_told_from_memory_that_comes_and_goes(tool: Any) -> None:
    comes_and_goes = [100, 100, 130, 100, 180, 100, 140, 100]
    assert tool.kept_growth(comes_and_goes) == 0
    assert tool.kept_growth([100, 100, 100, 110, 120, 130, 140, 150]) == pytest.approx(0.4)


@pytest.mark.slow
def test_clients_that_come_go_and_send_nonsense_get_their_own_words(tool: Any) -> None:
    with tool.load(experts="50%") as engine:
        known = tool.known_replies(engine, 12)
    with tool.serving(None, "--experts", "50%") as (url, pid):
        found, readings = asyncio.run(tool.under_load(url, pid, known, clients=16, seconds=6))
        left = tool.left_over(url)
    assert found.kinds["whole"] > 5
    assert (found.wrong, found.unanswered) == ([], [])
    assert left == {"kv_bytes": 0, "active": 0, "queued": 0}
    assert readings


@pytest.mark.thorough
def test_two_minutes_of_thirty_two_clients() -> None:
    run_tool("load_server.py", "--clients", "32", "--seconds", "120", "--experts", "50%")
