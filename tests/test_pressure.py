"""The guard against a real memory limit: a control group, and another process in it that takes half of the memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import memory_group

LIMIT_BYTES = 335_000_000  # a third of the experts of the 1 GB model

HOG = """
import sys, time
held = []
while sum(map(len, held)) < int(sys.argv[1]):
    held.append(bytearray(b"x" * 2**21))
    time.sleep(0.04)
print("holds", flush=True)
sys.stdin.read()
held.clear()
print("returned", flush=True)
sys.stdin = None
time.sleep(3600)
"""

CHILD = """
import json, subprocess, sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
from mlxmoe import load

hog, holds, alive, tokens, banks = None, b"", False, [], []
with load(sys.argv[2], context=400) as engine:
    plan = engine.plan
    for chunk in engine.stream([1, 2, 3], max_tokens=390):
        tokens.append((chunk.token, chunk.logprob))
        banks.append(engine.memory().bank_bytes)
        if len(tokens) == 4:
            command = [sys.executable, "-c", sys.argv[3], sys.argv[4]]
            hog = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if hog and not holds and len(tokens) > 10 and banks[-1] < banks[0] / 2:
            holds = hog.stdout.readline().strip()  # it has all it wanted
        if holds and hog.stdin and len(tokens) > 40:
            alive = hog.poll() is None
            hog.stdin.close()
            hog.stdin = None
        if hog and not hog.stdin and banks[-1] > min(banks):
            break
    events = [(event.action, event.text) for event in engine.stats().memory_events]
    kills = open(sys.argv[1] + "/memory.oom_control").read()
if hog:
    hog.kill()
print(json.dumps(dict(tokens=tokens, banks=banks, events=events, finish=chunk.finish_reason,
                      kills=kills, holds=holds.decode(), alive=alive,
                      experts=plan.expert_bytes, budget=plan.memory_bytes, total=plan.total_bytes)))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    with memory_group(LIMIT_BYTES) as folder:
        yield folder


@pytest.fixture(scope="module")
def frugal(gigabyte: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 1 GB model, asking two experts a token: one token's experts are a small part of the limit."""
    folder = tmp_path_factory.mktemp("frugal")
    for file in gigabyte.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((gigabyte / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 2}))
    return folder


@pytest.mark.slow
def test_a_model_three_times_the_limit_goes_on_exactly_while_another_process_takes_half(
    group: Path, frugal: Path
) -> None:
    from mlxmoe import load

    command = [sys.executable, "-c", CHILD, str(group), str(frugal), HOG, str(LIMIT_BYTES // 2)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"killed or failed: {done.stderr[-2000:]}"
    found = json.loads(done.stdout)
    assert found["experts"] >= 3 * LIMIT_BYTES
    assert found["total"] <= found["budget"] < LIMIT_BYTES
    banks, actions = found["banks"], [action for action, _ in found["events"]]
    assert min(banks) < banks[0] / 2, "the bank shrank"
    assert banks[-1] > min(banks), "and grew again"
    assert actions.index("shrink") < actions.index("grow")
    assert (found["holds"], found["alive"]) == ("holds", True), "the other process got its half, and was not killed"
    assert "oom_kill 0" in found["kills"]
    assert found["finish"] is None
    tokens = [tuple(pair) for pair in found["tokens"]]
    with load(frugal, experts="all") as engine:
        whole = engine.stream([1, 2, 3], max_tokens=len(tokens))
        assert [(chunk.token, chunk.logprob) for chunk in whole] == tokens
