"""README tells the truth: its commands run, and the two that matter stand at the top."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_runs(command: str, tmp_path: Path) -> None:
    line = f"{sys.executable} -m {command}"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}  # what one keeps changes no other
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("program", blocks("python"))
def test_a_program_of_the_readme_runs_with_the_demo_model(program: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_table_of_model_types_is_the_registrys() -> None:
    table = README.split("<!-- made by: mlxmoe models --markdown -->\n")[1].split("<!-- end -->")[0]
    assert table == markdown_table()


def test_names_in_the_readme_exist() -> None:
    import mlxmoe

    for name in set(re.findall(r"mlxmoe\.(\w+Error)", README)):
        assert hasattr(mlxmoe, name)


def test_every_option_that_the_readme_shows_exists() -> None:
    for command in ("generate", "chat", "verify", "models", "doctor", "profile", "plan", "tune", "serve"):
        text = subprocess.run(
            [sys.executable, "-m", "mlxmoe", command, "--help"],
            capture_output=True,
            text=True,
            env={"COLUMNS": "200"},
        ).stdout
        for line in re.findall(rf"mlxmoe {command} [^\n`]*", README + SERVING):
            for option in re.findall(r"(--[a-z-]+)", line):
                assert option in text, f"mlxmoe {command} has no {option}"
