"""Long use: the process is after thousands of tokens as large as it was after one thousand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import QWEN3_MOE, make_tiny

SOAK = """
import json, random, sys, time
from concurrent.futures import ThreadPoolExecutor
from mlxmoe import PromptError, load

rng, seen, footprints, tokens = random.Random(5), 0, [], int(sys.argv[2])
# One other thread, because MLX keeps something of each thread that ever computed.
with load(sys.argv[1], experts="50%", context=512) as engine, ThreadPoolExecutor(1) as other:
    session = engine.session()
    while seen < tokens:
        prompt = [rng.randrange(2000) for _ in range(rng.choice((1, 9, 80, 300)))]
        match rng.randrange(5):
            case 0:
                try:
                    seen += sum(1 for _ in session.stream("In the beginning", max_tokens=40))
                except PromptError:  # its context is full
                    session = engine.session()
            case 1:
                stream = engine.stream(prompt, max_tokens=100, temperature=0.8, seed=seen)
                for _ in range(30):
                    seen += next(stream, None) is not None
                del stream
            case 2:
                engine.resize(rng.choice(("25%", "50%", "all", "60%")))
            case 3:
                other.submit(engine.generate, prompt, max_tokens=40).result()
                seen += 40
            case _:
                seen += sum(1 for _ in engine.stream(prompt, max_tokens=60))
        if seen >= 1000 * (1 + len(footprints)):
            engine.resize("25%")  # one that changes nothing would not have freed memory returned
            engine.resize("50%")
            footprints.append(engine.memory().reading.footprint_bytes)
print(json.dumps([seen, footprints]))
time.sleep(1)  # MLX aborts where the process ends in the same moment as a thread that computed
"""


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [5_000, pytest.param(20_000, marks=pytest.mark.thorough)])
def test_thousands_of_tokens_leave_the_process_as_large_as_one_thousand(tmp_path: Path, tokens: int) -> None:
    folder = make_tiny(tmp_path / "small", {**QWEN3_MOE, "num_hidden_layers": 1})
    command = [sys.executable, "-c", SOAK, str(folder), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    seen, footprints = json.loads(done.stdout)
    assert seen >= tokens
    assert len(footprints) == tokens // 1000
    assert abs(footprints[-1] - footprints[0]) <= 0.02 * footprints[0], footprints
