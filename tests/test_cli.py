"""The command as a user types it: words to stdout, the rest to stderr, one message and a code for an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import command
from test_verify import load_damaged

from mlxmoe import PromptError

BEGINNING = ["generate", "In the beginning", "--max-tokens", "12"]


def mlxmoe(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, for what is a matter of processes."""
    return subprocess.run(
        [sys.executable, "-m", "mlxmoe", *arguments],
        capture_output=True, text=True, timeout=120, input=stdin,
        env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip


def test_generate_prints_the_same_at_every_expert_budget() -> None:
    sampled = [*BEGINNING, "--temperature", "0.8", "--seed", "1"]
    small, whole = command(*sampled, "--experts", "25%"), command(*sampled, "--experts", "all")
    assert small.exit_code == whole.exit_code == 0
    assert small.stdout == whole.stdout != ""
    assert "24 of 96 in memory" in small.stderr
    assert "all in memory" in whole.stderr
    assert "expert hits" in small.stderr


def test_quiet_says_nothing_but_the_words() -> None:
    done, loud = mlxmoe(*BEGINNING, "-q"), command(*BEGINNING)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == loud.stdout != ""


def test_a_prompt_may_come_from_stdin() -> None:
    piped = command("generate", "-", "-q", "--max-tokens", "12", stdin="In the beginning")
    assert piped.stdout == command(*BEGINNING, "-q").stdout != ""


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["generate", ""], 2, "Error: The prompt is empty"),
        ([*BEGINNING, "--temperature", "-1"], 2, "Error: temperature=-1.0 is out of range"),
        ([*BEGINNING, "--model", "/nowhere/at/all"], 3, "Error: There is no folder /nowhere/at/all"),
        ([*BEGINNING, "--experts", "1%"], 5, "Error: Expert budget is"),
        ([*BEGINNING, "--experts", "²"], 5, "is not a size"),
        ([*BEGINNING, "--memory", "1MB"], 5, "Error: The memory budget is 1.0 MB"),
        (["chat", "--system", "Be brief."], 2, "no chat template"),
        (["chat", "--temperature", "-1"], 2, "temperature=-1.0 is out of range"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_an_error_is_one_message_and_a_code(arguments: list[str], code: int, says: str) -> None:
    done = command(*arguments)
    assert done.exit_code == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_error_ends_the_process_with_its_code_and_no_traceback() -> None:
    done = mlxmoe(*BEGINNING, "--model", "/nowhere/at/all")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("Error: There is no folder /nowhere/at/all")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("redirect", "code", "says"),
    [(">/dev/full", 1, "No space left"), (">&-", 0, ""), ("<&-", 0, ""), ("2>&-", 0, "")],
)
def test_odd_standard_streams_are_no_defect(redirect: str, code: int, says: str) -> None:
    line = f"{sys.executable} -m mlxmoe generate And --max-tokens 3 -q {redirect}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "Internal" not in done.stderr


def test_words_that_the_terminal_cannot_show_are_replaced() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlxmoe", "generate", "Y dijo Jehová: ñ", "--max-tokens", "40", "-q"],
        capture_output=True, timeout=120, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_it_says_its_version() -> None:
    import mlxmoe as package

    assert command("--version").stdout == f"mlxmoe {package.__version__}\n"


def test_what_makes_no_sense_is_said_before_a_download() -> None:
    for option, value in (("--experts", "foo"), ("--temperature", "-1")):
        done = command(*BEGINNING, "--model", "org/nothing", option, value)
        assert value in done.stderr
        assert "hub" not in done.stderr


def test_debug_shows_the_traceback() -> None:
    done = command("generate", "", "--debug")
    assert done.exit_code == 1
    assert isinstance(done.exception, PromptError), "left for Python to show, which ends with 1"
    assert "Error" not in done.stderr


def test_ctrl_c_ends_a_reply_with_130_and_keeps_what_was_said() -> None:
    arguments = [sys.executable, "-m", "mlxmoe", "generate", "And", "--max-tokens", "250"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + out).endswith("\n")
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error() -> None:
    line = f"{sys.executable} -m mlxmoe generate And --max-tokens 200 -q | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_chat_reads_turns_from_stdin_and_goes_on() -> None:
    done = command(
        "chat",
        "--experts",
        "25%",
        "--temperature",
        "0",
        "--max-tokens",
        "6",
        stdin="In the beginning\n/stats\n\n/reset\nx\n/exit\nno",
    )
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == 2
    assert "continues what you write" in done.stderr
    assert "misses" in done.stderr


def test_verify_prints_a_table_and_the_number_of_values(tiny: Path) -> None:
    done = command("verify", tiny)
    assert done.exit_code == 0, done.stderr
    assert "bit-identical to stock mlx-lm" in done.stdout
    assert "decode 64" in done.stdout
    layers = command("verify", tiny, "--layers")
    assert "Compared layer by layer" in layers.stdout


def test_verify_exits_with_1_on_a_difference(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxmoe.verify.logits.load_folder", load_damaged)
    done = command("verify", tiny)
    assert done.exit_code == 1, done.stderr
    assert "DIFFER from stock mlx-lm" in done.stdout


def test_models_lists_what_mlx_lm_defines() -> None:
    done = command("models")
    assert done.exit_code == 0
    for name in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "nemotron_h"):
        assert name in done.stdout


@pytest.mark.slow
def test_the_first_words_come_before_the_last_are_made() -> None:
    arguments = [sys.executable, "-m", "mlxmoe", "generate", "And", "--max-tokens", "120", "-q"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(1)
    assert process.poll() is None, "it is still at work when its first words are here"
    assert len(process.communicate(timeout=120)[0]) > 100
    assert process.returncode == 0
