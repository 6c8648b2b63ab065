"""README tells the truth: its commands run, and the two that matter stand at the top."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import command

from mlxmoe.registry import markdown_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVING = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")

# Not run here: the two set-up commands (CI runs the second; a clean machine the first), models of many gigabytes, and
# programs that wait for a person.
NOT_RUN = ("pip install", "mlx-community/", "mlxmoe chat", "mlxmoe serve", "FOLDER")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [
    line
    for block in blocks("bash")
    for line in block.splitlines()
    if line.startswith("mlxmoe") and not any(word in line for word in NOT_RUN)
]


def test_both_commands_stand_in_the_first_thirty_lines() -> None:
    top = README.splitlines()[:30]
    assert any(line.startswith("python3 -m venv") and "&& mlxmoe generate" in line for line in top)
    assert any(line.startswith("python3 -m venv") and line.endswith("&& pytest") for line in top)


def test_there_is_something_to_run() -> None:
    assert len(COMMANDS) >= 4
    assert len(blocks("python")) >= 1


@pytest.fixture
def a_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """To work in, with a cache of its own: what one command keeps changes no other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.usefixtures("a_users_folder", "quick_tuning")
def test_a_command_of_the_readme_runs(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxmoe.verify.logits.PREFILL_TOKENS", (3, 65))  # of all lengths by test_verify.py
    done = command(*shlex.split(line)[1:])
    assert done.exit_code == 0, done.output
    assert done.stdout


def test_the_first_command_of_the_readme_runs_as_a_shell_runs_it(tmp_path: Path) -> None:
    line = next(line for line in blocks("bash")[0].splitlines() if "&& mlxmoe " in line).rpartition("&& mlxmoe ")[2]
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m mlxmoe {line}"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    begins = README.split("It goes on from there: `")[1].split(" ...`")[0]
    assert begins in done.stdout


@pytest.mark.parametrize("program", blocks("python"))
@pytest.mark.usefixtures("a_users_folder", "registers_nothing")
def test_a_program_of_the_readme_runs_with_the_demo_model(program: str, capfd: pytest.CaptureFixture[str]) -> None:
    exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    assert capfd.readouterr().err == ""


def test_a_program_that_closes_nothing_ends_as_any_other(tmp_path: Path) -> None:
    """The first program of the README, in a process of its own."""
    program = [sys.executable, "-c", blocks("python")[0]]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_table_of_model_types_is_the_registrys() -> None:
    table = README.split("<!-- made by: mlxmoe models --markdown -->\n")[1].split("<!-- end -->")[0]
    assert table == markdown_table()


def test_names_in_the_readme_exist() -> None:
    import mlxmoe

    for name in set(re.findall(r"mlxmoe\.(\w+Error)", README)):
        assert hasattr(mlxmoe, name)


def test_every_option_that_the_readme_shows_exists() -> None:
    for name in ("generate", "chat", "verify", "models", "doctor", "profile", "plan", "tune", "serve"):
        text = command(name, "--help", COLUMNS="200").stdout
        for line in re.findall(rf"mlxmoe {name} [^\n`]*", README + SERVING):
            for option in re.findall(r"(--[a-z-]+)", line):
                assert option in text, f"mlxmoe {name} has no {option}"
