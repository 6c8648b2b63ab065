"""mlxmoe profile: tables, trace, picture and kept profile; what makes no sense is one message and a code."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from tiny import QWEN3_MOE, make_tiny
from typer.testing import CliRunner

from mlxmoe import Trace
from mlxmoe.cli.commands import app

TEXT = "In the beginning God created the heaven and the earth. Y dijo Dios: Sea la luz. "


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlxmoe" / "profiles"


def profile(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


def test_a_text_is_read_through_and_kept(tiny: Path, tmp_path: Path, kept: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 40, encoding="utf-8")
    arguments = ["--text", tmp_path / "text.txt", "--tokens", "600", "--trace", tmp_path / "out.npz"]
    done = profile(tiny, *arguments, "--experts", "50%", "--json")
    assert done.exit_code == 0, done.output
    stats = json.loads(done.stdout)
    trace = Trace.load(tmp_path / "out.npz")
    assert stats["tokens"] == trace.tokens == 600, "in two pieces: the context is 512"
    assert len(stats["hit_rates"]) == 9
    assert len(list(kept.iterdir())) == 1
    again = profile(tmp_path / "out.npz", "--json")
    assert json.loads(again.stdout) == stats


def test_a_text_that_is_cut_within_a_character_or_marked_is_read(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbf" + "ñ".encode() * 1000)  # 32 bytes for a token: an odd cut
    done = profile(tiny, "--text", tmp_path / "text", "--tokens", "3", "--no-save", "--json")
    assert json.loads(done.stdout)["tokens"] == 3


def test_without_a_text_the_model_replies_to_prompts(tiny: Path, kept: Path) -> None:
    done = profile(tiny, "--tokens", "40", "--no-save", "-q")
    assert done.exit_code == 0, done.output
    assert "layers of 8 experts, 2 for each token" in done.stdout
    assert "lookahead" not in done.stdout, "a column that nobody measured is not shown"
    assert done.stderr == ""
    assert not kept.exists()
    tokens = int(done.stdout.split()[0])
    assert 40 <= tokens < 100


def test_a_context_too_short_for_every_prompt_is_said(tiny: Path) -> None:
    done = profile(tiny, "--tokens", "40", "--context", "3")
    assert (done.exit_code, "context is 3 tokens" in done.stderr) == (2, True)


def test_the_picture_needs_its_extra(tmp_path: Path) -> None:
    trace = Trace(np.zeros((3, 2, 1), np.uint16), (2, 4)).save(tmp_path / "t.npz")
    done = profile(trace, "--plot", tmp_path / "p.png")
    if find_spec("matplotlib") is None:
        assert (done.exit_code, "mlxmoe[plot]" in done.stderr) == (2, True)
    else:
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
        done = profile(trace, "--plot", tmp_path)
        assert (done.exit_code, "cannot be written" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no text"),
        (b" \n\n ", "holds no text"),
        (b"abc\xff\xfe", "is not UTF-8 text: byte 3 of it (0xff)"),
        (b"x" * 15_000 + b"\xff", "byte 15000 of it"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_text_that_is_none_is_refused_before_the_model_is_loaded(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    done = profile("/nowhere/at/all", "--text", tmp_path / "text")
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stdout == ""


def test_a_torn_trace_a_dense_model_and_an_empty_trace_are_refused(tmp_path: Path) -> None:
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 and no more")
    done = profile(tmp_path / "torn.npz")
    assert (done.exit_code, "is no whole trace" in done.stderr) == (1, True)
    empty = Trace(np.zeros((0, 2, 1), np.uint16), (2, 4)).save(tmp_path / "empty.npz")
    done = profile(empty)
    assert (done.exit_code, "no token that asked for an expert" in done.stderr) == (2, True)
    dense = {key: value for key, value in QWEN3_MOE.items() if "expert" not in key} | {"model_type": "qwen3"}
    done = profile(make_tiny(tmp_path / "dense", dense), "-q")
    assert (done.exit_code, "no routed experts" in done.stderr) == (2, True)
    for option in ("--tokens=0", "--experts=1%", "--trace=/no/where.npz"):
        done = profile("--no-save", option)
        assert done.exit_code in (2, 5)
        assert "Traceback" not in done.stderr
