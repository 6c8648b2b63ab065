"""Every example runs as it stands, is short, and prints something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= 30
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if example.stem == "small_memory":
        assert "The same words: True" in done.stdout


def test_there_are_examples() -> None:
    names = {example.stem for example in EXAMPLES}
    assert names >= {"stream", "chat_session", "small_memory", "own_sampling", "watch_memory"}
