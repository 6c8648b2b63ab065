"""tools/read_layouts.py: both layouts give the same bytes, what it found is JSON, and its files are gone."""

from __future__ import annotations

import importlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import TOOLS


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool's module."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("read_layouts")


def command(folder: Path, size: str = "60kB") -> list[str]:
    return ["--expert", "tiny", "--size", size, "--sets", "1,4", "--pairs", "3", "--folder", str(folder)]


def test_both_layouts_are_measured_and_give_the_same_bytes(
    layouts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts.main(command(tmp_path))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["same_bytes"] is True
    assert [(row["state"], row["count"], row["pairs"]) for row in found["rows"]] == [
        ("cold", 1, 3),
        ("cold", 4, 2),  # two layers of eight experts, of which three are read alone, have no more
        ("warm", 1, 3),
        ("warm", 4, 3),
    ]
    assert all(row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1] for row in found["rows"])
    assert list(tmp_path.iterdir()) == []


def test_a_byte_that_differs_is_found(layouts: Any, tmp_path: Path) -> None:
    files = layouts.Files(tmp_path, layouts.PRESETS["tiny"], 1, 0)
    assert layouts.same_bytes(files)
    for expert in range(8):
        block, stacked = files.places[1][0][expert], files.places[0][0][expert]
        by_expert, in_order = files.paths[1].read_bytes(), files.paths[0].read_bytes()
        for nbytes, here, there in zip(files.model.tensors, block, stacked, strict=True):
            assert by_expert[here : here + nbytes] == in_order[there : there + nbytes]
    with open(files.paths[1], "r+b") as file:
        file.seek(files.places[1][0][0][2])
        file.write(bytes(96))
    files.states[files.paths[1]] = layouts.FileState.at(files.paths[1])
    assert not layouts.same_bytes(files)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_files_are_gone_when_it_is_told_to_end(
    layouts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def measure(files: Any, *_: Any) -> None:
        assert all(path.exists() for path in files.paths)
        signal.raise_signal(number)

    monkeypatch.setattr(layouts, "measure_warm", measure)
    before = signal.getsignal(number)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        layouts.main(command(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is before


def test_a_full_disk_is_named_before_anything_is_written(
    layouts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        layouts.main(command(tmp_path, "1000000000GB"))
    assert "Give a smaller --size or another --folder." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
