"""What mlxmoe costs beside stock mlx-lm, in paired runs of one minute: `bench.py [CASE ...]`.

Prints a table of medians with quartiles, targets and limits, and one line of JSON. Every configuration that is
measured is checked to be bit-identical to mlx-lm in the same run. The limit of a decode step or a prefill chunk is
the longer of its compute (mlx-lm's time with everything resident) and of reading the experts that are missing.

Owns the command; the cases are in bench_cases.py, bench_layers.py, bench_rates.py and bench_cold.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bench_cases
import bench_cold
import bench_layers
import bench_rates
from bench_cases import Bench, SkippedError
from bench_child import ChildDiedError
from bench_report import Row, table
from bench_sequence import NEIGHBOURS, make_model
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

CASES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "resident": bench_cases.resident,
    "load": bench_cases.load_time,
    "warm": bench_cases.warm,
    "cold": bench_cold.cold,
    "prefill": bench_cases.prefill,
    "ttft": bench_cases.ttft,
    "hit-path": bench_layers.hit_path,
    "trace": bench_layers.trace,
    "rate": bench_rates.rate,
    "lookahead": bench_rates.lookahead,
    "read-rate": bench_cold.read_rate,
}
FULL: dict[str, Any] = {"steps": 120, "repeats": 5, "prefill_tokens": (512, 256)}
QUICK: dict[str, Any] = {"steps": 8, "repeats": 1, "prefill_tokens": (32, 16)}
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        for name, case in CASES.items():
            print(f"{name:10} {(case.__doc__ or '').splitlines()[0]}")
        return 0
    # Also where it runs in the background, which a shell starts with SIGINT ignored; Python leaves it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlxmoe-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        model = options.model or make_model(folder / "model", "--neighbours", str(NEIGHBOURS))
        sizes = QUICK if options.quick else FULL
        given = {name: getattr(options, name) for name in ("steps", "repeats") if getattr(options, name) is not None}
        bench = Bench(model, folder, read_rate=options.read_rate, trace=options.trace, **(sizes | given))
        found = measure(bench, options.cases or list(CASES))
    print(table(found.rows))
    if rates := bench.facts.get("lru_hit_rates"):
        print(f"\nHit rates of an LRU on the tokens decoded: {', '.join(f'{k} {v:.3f}' for k, v in rates.items())}.")
    for name, reason in found.skipped.items():
        print(f"\n{name}: skipped, as {reason}.")
    for name, reason in found.failed.items():
        print(f"\n{name}: FAILED. {reason}")
    if not found.whole:
        print("\nInterrupted: what is missing was not measured.")
    print(json.dumps(report(bench, found, options.quick)))
    if not found.whole:
        return 130
    missed = options.check and any(row.failed for row in found.rows)
    return 1 if found.failed or missed else 0


@dataclass
class Found:
    """What cases came to: rows, and by a case's name why it was skipped or failed. `whole`: nobody interrupted."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    whole: bool = True


def measure(bench: Bench, names: Sequence[str]) -> Found:
    """Run the cases `names`; Ctrl-C ends it and keeps the rows."""
    found = Found()
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(names))
        bench.say = lambda text: progress.update(task, description=text)
        try:
            for name in names:
                try:
                    for row in CASES[name](bench):
                        found.rows.append(row)
                        progress.console.print(f"{row.case}: {row.what}: {row.value:.4g} {row.unit}", highlight=False)
                except SkippedError as reason:
                    found.skipped[name] = str(reason)
                except ChildDiedError as error:
                    found.failed[name] = str(error)
                progress.advance(task)
        except KeyboardInterrupt:
            found.whole = False
    return found


def report(bench: Bench, found: Found, quick: bool) -> dict[str, Any]:
    return {
        "model": bench.model.name,
        "quick": quick,
        "whole": found.whole,
        "steps": bench.steps,
        "repeats": bench.repeats,
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
        "machine": {"system": platform.system(), "processor": platform.machine()},
        **bench.facts,
        "rows": [row.as_dict() for row in found.rows],
        "skipped": found.skipped,
        "failed": found.failed,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all of them by default; see --list")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--model", type=Path, help="folder of an MLX checkpoint; a synthetic one is made by default")
    parser.add_argument("--folder", type=Path, help="keep made models and tokens here; temporary by default")
    parser.add_argument("--quick", action="store_true", help="few and short runs: to see that it runs")
    parser.add_argument("--steps", type=int, help=f"decode steps of a case, default {FULL['steps']}")
    parser.add_argument("--repeats", type=int, help=f"of what takes longer, default {FULL['repeats']}")
    parser.add_argument("--trace", type=Path, help="recorded routing, .npz, for the case trace")
    parser.add_argument("--read-rate", type=parse_rate, default=parse_rate("500MB"), help="a second, default 500MB")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"no case is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    return options


def parse_rate(text: str) -> float:
    """Bytes a second: "500MB", "1.5GB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?(?:/s)?", text)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate such as 500MB")
    return float(match[1]) * UNITS[match[2]]


if __name__ == "__main__":
    sys.exit(main())
