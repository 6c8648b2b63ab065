"""Ctrl-C before a command works: its process ends with 130 and says nothing, whatever it is importing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

COMMANDS = {
    "generate": ["And", "--max-tokens", "5"],
    "chat": [],
    "verify": [],
    "models": [],
    "doctor": [],
    "profile": ["--no-save", "--tokens", "5"],
    "plan": [],
    "tune": ["--no-save", "--budget", "1s"],
    "serve": ["--port", "0"],
}
BEGINNING = ("typer.main", "rich.console", "mlxmoe.memory.sizes")  # what every command takes
WORKING = ("numpy", "mlx.core", "transformers.utils", "mlx_lm.utils", "mlxmoe.hub")  # and what those with a model do


def interrupted_after(module: str, *arguments: str) -> tuple[int, str]:
    """The exit code of a command that gets SIGINT once it has imported `module`, and what it says from then on."""
    command = [sys.executable, "-X", "importtime", "-m", "mlxmoe", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=hears_ctrl_c,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("import time:") and line.rpartition("|")[2].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        else:
            pytest.fail(f"{module} was not imported")
        _, said = process.communicate(timeout=60)
    return process.returncode, "".join(line for line in said.splitlines(True) if not line.startswith("import time:"))


def hears_ctrl_c() -> None:
    """Also where the tests run in the background, which a shell starts with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("module", BEGINNING)
def test_help_is_interrupted_without_a_word(module: str) -> None:
    assert interrupted_after(module, "--help") == (130, "")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_interrupted_without_a_word_while_it_imports(name: str) -> None:
    for module in BEGINNING if name == "models" else (*BEGINNING, *WORKING):
        assert interrupted_after(module, name, *COMMANDS[name]) == (130, ""), module


def run(program: str, folder: Path, before: Callable[[], None] = hears_ctrl_c) -> subprocess.CompletedProcess[str]:
    """The program, which begins as the command does; what is in `folder` can be imported."""
    program = f"import os, signal, sys\nsys.path.insert(0, {str(folder)!r})\n{PRELUDE}{program}"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, preexec_fn=before
    )


PRELUDE = """
from mlxmoe.cli import interrupts
interrupts.end_at_once()
"""
SWALLOWING = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    print("swallowed")
"""


def test_a_module_cannot_swallow_it(tmp_path: Path) -> None:
    (tmp_path / "swallowing.py").write_text(SWALLOWING)
    done = run("with interrupts.raised():\n    import swallowing\n", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_at_work_it_can_be_caught_and_after_that_it_ends_the_process(tmp_path: Path) -> None:
    program = """
kill = lambda: os.kill(os.getpid(), signal.SIGINT)
try:
    with interrupts.raised():
        kill()
except KeyboardInterrupt:
    print("caught", flush=True)
kill()
print("too late")
"""
    done = run(program, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "caught\n", "")


def test_it_stays_ignored_where_it_was(tmp_path: Path) -> None:
    program = "with interrupts.raised():\n    os.kill(os.getpid(), signal.SIGINT)\nprint('went on')\n"
    done = run(program, tmp_path, lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")
