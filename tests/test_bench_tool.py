"""tools/bench.py: that it runs, tells what it found as JSON, and that its slow reader is as slow as it says."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import TOOLS


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the tools' readers."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("bench_reads")


def run_bench(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the last line's JSON."""
    command = [sys.executable, str(TOOLS / "bench.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_it_measures_two_cases_and_finds_them_bit_identical(tiny: Path, tmp_path: Path) -> None:
    code, found = run_bench("warm", "prefill", "trace", "--quick", "--model", str(tiny), "--folder", str(tmp_path))
    assert code == 0
    assert found["whole"]
    assert found["skipped"] == {"trace": "no --trace FILE.npz was given"}
    warm = [row for row in found["rows"] if row["case"] == "warm"]
    assert [row["details"]["slots"] for row in warm] == [[2], [4], [6]]
    assert all(row["exact"] is True and row["value"] > 0 for row in warm)
    assert all(row["quartiles"][0] <= row["value"] <= row["quartiles"][1] for row in warm)
    assert warm[0]["target"] == {"sense": "<=", "bound": 1.1}
    assert warm[0]["reached"] == (warm[0]["value"] <= 1.1)
    prefill = [row for row in found["rows"] if row["case"] == "prefill"]
    assert all(row["exact"] is True for row in prefill if "logits" in row["what"])
    assert [row["value"] for row in prefill if row["unit"] == "times"] == [1, 1]


def test_all_threads_together_keep_to_a_declared_rate(reads: Any) -> None:
    now, lock, sleeps = [0.0], threading.Lock(), []

    def sleep(seconds: float) -> None:
        with lock:
            sleeps.append(seconds)

    slow = reads.DeclaredRate(1000.0, lambda *_: 500, clock=lambda: now[0], sleep=sleep)
    threads = [threading.Thread(target=slow, args=(0, [], 0)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sleeps) == [0.5, 1.0, 1.5, 2.0], "one after the other, whoever asked"
    now[0] = 10.0  # the disk has been idle: it owes nobody the time
    slow(0, [], 0)
    assert sleeps[-1] == 0.5


def test_reads_are_counted_by_place_and_by_the_time_that_any_is_under_way(reads: Any) -> None:
    counted = reads.CountedReads()
    for offset, began, ended in [(0, 0.0, 2.0), (8, 1.0, 3.0), (0, 5.0, 6.0)]:
        counted.reads.append(reads.Read(3, offset, 8, began, ended))
    assert (counted.nbytes, counted.most_often, counted.busy_s) == (24, 2, 4.0)
