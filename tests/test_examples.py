"""Every example runs as it stands, is short, and prints something."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.usefixtures("registers_nothing")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_is_short(
    example: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(example.read_text().splitlines()) <= 30
    monkeypatch.setattr("sys.argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    said = capfd.readouterr().out
    assert said.strip()
    if example.stem == "small_memory":
        assert "The same words: True" in said


def test_there_are_examples() -> None:
    names = {example.stem for example in EXAMPLES}
    assert names >= {"stream", "chat_session", "small_memory", "own_sampling", "watch_memory"}
