"""A process that loads one model and decodes: within a memory limit, or to see how long loading takes.

Run by the cases through `run_child`; everything is imported before it enters its control group and before any clock
runs, so that the limit and the times are those of the model alone.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

GROUPS = Path("/sys/fs/cgroup/memory")  # of version 1


def run_child(**task: Any) -> dict[str, Any]:
    """Run this file as a process of its own; what it found. Raises RuntimeError where it died."""
    command = [sys.executable, __file__, json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"A benchmark's process ended with {done.returncode}: {done.stderr.strip()[-800:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def memory_group(name: str, limit_bytes: int) -> Iterator[Path]:
    """A control group with a limit. Raises OSError where none can be made."""
    folder = GROUPS / name
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield folder
    finally:
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:  # its last process is not quite gone
                time.sleep(0.05)


def main(task: dict[str, Any]) -> dict[str, Any]:
    """`kind`: "ours" or "stock"; `experts`, `tokens`, `warm_up`, `group` (a folder), `memory` (for load)."""
    import mlx_lm
    from bench_reads import CountedReads
    from bench_subject import Subject, no_garbage_collection, open_engine

    group = None if task.get("group") is None else Path(task["group"])
    if group is not None:
        (group / "cgroup.procs").write_text("0")
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        began = time.perf_counter()
        counted = CountedReads()
        if task["kind"] == "stock":
            subject = Subject(mlx_lm.load(task["model"])[0])
        else:
            limits = {} if "memory" not in task else {"memory": task["memory"]}
            engine = stack.enter_context(open_engine(Path(task["model"]), task["experts"], counted, **limits))
            subject = Subject.of(engine)
        found["load_s"] = time.perf_counter() - began
        tokens, warm_up = task["tokens"], task.get("warm_up", 0)
        seconds, digest = [], hashlib.sha256()
        anonymous = _anonymous(group)
        with no_garbage_collection():
            for place, token in enumerate(tokens):
                if place == warm_up:
                    counted.clear()
                    disk = _disk_bytes()
                began = time.perf_counter()
                logits = subject.run([token])
                seconds.append(time.perf_counter() - began)
                digest.update(memoryview(logits).cast("B"))  # type: ignore[arg-type]
                if place % 8 == 0:
                    anonymous = max(anonymous, _anonymous(group))
        found |= {"seconds": seconds[warm_up:], "digest": digest.hexdigest(), "anonymous_bytes": anonymous}
        if tokens:
            found |= {"read_bytes": counted.nbytes, "busy_s": counted.busy_s, "disk_bytes": _disk_bytes() - disk}
        if task["kind"] == "ours":
            found["slots"] = sorted({layer.slots for layer in engine.stats().layers})
            found["memory_events"] = len(engine.stats().memory_events)
    return found


def _anonymous(group: Path | None) -> int:
    """Bytes of the group that are no file's; 0 without one."""
    if group is None:
        return 0
    lines = (group / "memory.stat").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("total_rss ")))


def _disk_bytes() -> int:
    """Bytes that this process's reads took from a disk rather than from the page cache; 0 where nobody says."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes:")))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
