"""A process that loads one model and decodes token by token as it is told: within a memory limit, or to time loading.

Everything is imported before it enters its control group and before any clock runs, so that the limit and the times
are those of the model alone. A Child is the other end; two of them take their steps by turns.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

GROUPS = Path("/sys/fs/cgroup/memory")  # of version 1


class ChildDiedError(Exception):
    """A process that was measured ended before it should: killed for its memory, or by an error it printed."""


class Child:
    """This file as a process that has loaded a model; a context manager. `load_s`: how long `load` took there.

    `task`: `kind` ("ours" or "stock") and `model`; for ours `experts`, `memory`, and `group`, the folder of its
    control group; `cache`, a folder for what it would keep in the user's. Raises ChildDiedError where the process
    dies.
    """

    def __init__(self, **task: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": task["cache"]} if "cache" in task else None,
            process_group=0,  # Ctrl-C is ours to hear; it ends when its input does
        )
        self.load_s = cast(float, self._answer())

    def step(self, token: int) -> float:
        """Run one decode step; its seconds."""
        return cast(float, self._ask(token))

    def warmed_up(self) -> None:
        """What is counted from here on is reported."""
        self._ask("warm")

    def report(self) -> dict[str, Any]:
        """What all steps came to, and what the reads since `warmed_up`."""
        return cast(dict[str, Any], self._ask("report"))

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, question: int | str) -> Any:
        assert self._process.stdin is not None, "it was opened with a pipe"
        try:
            self._process.stdin.write(f"{json.dumps(question)}\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it died, which the missing answer says
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None, "it was opened with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise ChildDiedError(f"A process that was measured ended with {self._process.wait()}.")
        return json.loads(line)


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


def main(task: dict[str, Any]) -> None:
    import mlx_lm
    from bench_reads import CountedReads
    from bench_subject import Subject, no_garbage_collection, open_engine

    group = None if task.get("group") is None else Path(task["group"])
    if group is not None:
        (group / "cgroup.procs").write_text("0")
    logging.getLogger("mlxmoe").setLevel(logging.ERROR)  # that MEMORY is more than there is
    counted, digest = CountedReads(), hashlib.sha256()
    engine = None
    with ExitStack() as stack:
        began = time.perf_counter()
        if task["kind"] == "stock":
            subject = Subject(mlx_lm.load(task["model"])[0])
        else:
            limits = {} if "memory" not in task else {"memory": task["memory"]}
            engine = stack.enter_context(open_engine(Path(task["model"]), task["experts"], counted, **limits))
            subject = Subject.of(engine)
        _say(time.perf_counter() - began)
        stack.enter_context(no_garbage_collection())
        anonymous, disk = _anonymous(group), 0
        for line in sys.stdin:
            match json.loads(line):
                case "warm":
                    counted.clear()
                    disk = _disk_bytes()
                    _say(None)
                case "report":
                    found = {"digest": digest.hexdigest(), "anonymous_bytes": anonymous}
                    found |= {"read_bytes": counted.nbytes, "busy_s": counted.busy_s}
                    found["disk_bytes"] = _disk_bytes() - disk
                    if engine is not None:
                        found["slots"] = sorted({layer.slots for layer in engine.stats().layers})
                        found["memory_events"] = len(engine.stats().memory_events)
                    _say(found)
                case token:
                    began = time.perf_counter()
                    logits = subject.run([token])
                    seconds = time.perf_counter() - began
                    digest.update(memoryview(cast(Any, logits)).cast("B"))
                    anonymous = max(anonymous, _anonymous(group))
                    _say(seconds)


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


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
    main(json.loads(sys.argv[1]))
