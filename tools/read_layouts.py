"""What it would pay to store experts one behind the other: `read_layouts.py --expert qwen3-30b-a3b`.

MLX stacks experts: one tensor of all experts after the other, so an expert lies in as many pieces as it has tensors.
Here the same bytes are laid out that way (behind a header, so not page aligned, as in a safetensors file) and once
more expert by expert, each on a page of its own. Random sets of one layer's experts are then read by the product's
own reader from the two files in pairs, the order of a pair alternating: cold, each expert only once, and from the
page cache. `--trace` weighs the cold sets as a recording's misses would, with the product's eviction.

Prints a table and then one line of JSON. A ratio below 1 says that expert by expert is faster. Cold is what the
system calls cold: a hypervisor or a disk has caches of its own. The files are gone when it ends.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from bench_reads import Preadv, can_drop_page_cache
from compare_eviction import read_trace, replay
from eviction_policies import CHOSEN, POLICIES
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mlxmoe.doctor.machine import Machine
from mlxmoe.doctor.read_rate import F_NOCACHE
from mlxmoe.experts import reader as product
from mlxmoe.experts.reader import PIECE_BYTES, ExpertReader, Piece
from mlxmoe.experts.safetensors import FileState

PAGE_BYTES = 16 * 1024  # a Mac's; the test machine's are a quarter of it
HEADER_BYTES = 20_011  # a safetensors header ends anywhere, and so no tensor begins on a page
MARGIN_BYTES = 2**30  # left free on the disk
STACKED, BY_EXPERT = 0, 1
LAYOUTS = ("stacked", "by expert")


@dataclass(frozen=True)
class Model:
    """`tensors`: bytes of each tensor of one expert, in the order in which they are stacked."""

    experts: int
    tensors: tuple[int, ...]

    @property
    def expert_bytes(self) -> int:
        return sum(self.tensors)

    @property
    def layer_bytes(self) -> int:
        return self.experts * self.expert_bytes

    @property
    def block_bytes(self) -> int:
        """Of an expert on pages of its own."""
        return -(-self.expert_bytes // PAGE_BYTES) * PAGE_BYTES


PRESETS = {
    # 2048 x 768 in 4 bits; scales and biases in bfloat16 of groups of 64.
    "qwen3-30b-a3b": Model(128, (786_432, 49_152, 49_152) * 3),
    # 2048 x 512, as above.
    "qwen3.5-35b-a3b": Model(256, (524_288, 32_768, 32_768) * 3),
    # 2880 x 2880 in mxfp4: a scale of one byte for 32 weights, and a bias of the projection in bfloat16.
    "gpt-oss-20b": Model(32, (4_147_200, 259_200, 5_760) * 3),
    # make_synthetic.py's: 512 x 256 in 4 bits; scales and biases in float32 of groups of 64.
    "bench": Model(64, (65_536, 8_192, 8_192) * 3),
    "tiny": Model(8, (1_000, 96, 96) * 3),  # for tests
}


class Files:
    """The same bytes in both layouts. `places[layout][layer][expert][tensor]`: offset in the layout's file."""

    def __init__(self, folder: Path, model: Model, layers: int, seed: int) -> None:
        self.model, self.layers = model, layers
        self.paths = (folder / "stacked.bin", folder / "by_expert.bin")
        # Weights first and what is small behind them, so that few runs of at most PIECE_BYTES make up an expert.
        order = sorted(range(len(model.tensors)), key=lambda tensor: -model.tensors[tensor])
        within, end = {}, 0
        for tensor in order:
            within[tensor] = end
            end += model.tensors[tensor]
        self.places: tuple[list[list[list[int]]], list[list[list[int]]]] = ([], [])
        for layer in range(layers):
            starts, end = [], HEADER_BYTES + layer * model.layer_bytes
            for nbytes in model.tensors:
                starts.append(end)
                end += nbytes * model.experts
            first = layer * model.experts
            for expert in range(model.experts):
                stacked = [at + expert * nbytes for at, nbytes in zip(starts, model.tensors, strict=True)]
                block = (first + expert) * model.block_bytes
                by_expert = [block + within[tensor] for tensor in range(len(model.tensors))]
                for places, offsets in zip(self.places, (stacked, by_expert), strict=True):
                    if expert == 0:
                        places.append([])
                    places[layer].append(offsets)
        self._write(np.random.default_rng(seed), order)
        self.states = {path: FileState.at(path) for path in self.paths}

    @property
    def nbytes(self) -> tuple[int, int]:
        return self.states[self.paths[STACKED]].size_bytes, self.states[self.paths[BY_EXPERT]].size_bytes

    def _write(self, random_bytes: np.random.Generator, order: Sequence[int]) -> None:
        """Random bytes, which no disk below can make smaller."""
        model = self.model
        padding = bytes(model.block_bytes - model.expert_bytes)
        with open(self.paths[STACKED], "wb") as stacked, open(self.paths[BY_EXPERT], "wb") as by_expert:
            if sys.platform == "darwin":  # where nothing can be dropped from the page cache, it should not get in
                for file in (stacked, by_expert):
                    fcntl.fcntl(file.fileno(), F_NOCACHE, 1)
            stacked.write(bytes(HEADER_BYTES))
            for _ in track(range(self.layers), "writing", console=Console(stderr=True), transient=True):
                tensors = [memoryview(random_bytes.bytes(nbytes * model.experts)) for nbytes in model.tensors]
                for tensor in tensors:
                    stacked.write(tensor)
                parts: list[bytes | memoryview] = []
                for expert in range(model.experts):
                    for number in order:
                        nbytes = model.tensors[number]
                        parts.append(tensors[number][expert * nbytes : (expert + 1) * nbytes])
                    parts.append(padding)
                by_expert.write(b"".join(parts))  # in one go as a tensor is: writes decide how a file lies on a disk
            for file in (stacked, by_expert):
                file.flush()
                os.fsync(file.fileno())  # what is not written yet is not dropped from the page cache

    def drop(self) -> None:
        """Let the system forget both files' pages, where it lets us."""
        if can_drop_page_cache():
            for path in self.paths:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)

    def reader(self, layout: int, preadv: Preadv = os.preadv) -> ExpertReader:
        return ExpertReader({self.paths[layout]: self.states[self.paths[layout]]}, preadv=preadv)


class Slots:
    """Memory as a layer's bank has it: an array of slots for each tensor."""

    def __init__(self, model: Model, slots: int) -> None:
        self.arrays = [np.zeros((slots, nbytes), np.uint8) for nbytes in model.tensors]
        for array in self.arrays:
            array.fill(1)  # pages are there before the clock runs
        self._views = [[row.data for row in array] for array in self.arrays]

    def pieces(self, files: Files, layout: int, layer: int, experts: Sequence[int]) -> list[Piece]:
        return [
            Piece(files.paths[layout], offset, views[slot])
            for slot, expert in enumerate(experts)
            for offset, views in zip(files.places[layout][layer][expert], self._views, strict=True)
        ]


@dataclass(frozen=True)
class Once:
    """One read. `cpu_s`: of all threads. `device_bytes`: None where the system does not tell."""

    seconds: float
    cpu_s: float
    device_bytes: int | None


@dataclass(frozen=True)
class Row:
    """Sets of `count` experts. What comes twice is of both layouts, stacked first; the ratio is by expert to stacked.

    `cpu_us`: processor time of an expert, the system's copies included. `device_to_asked`: bytes from the device for
    each byte that was asked for.
    """

    state: str
    count: int
    pairs: int
    ms: tuple[float, float]
    ratio: float
    quartiles: tuple[float, float]
    cpu_us: tuple[float, float]
    device_to_asked: tuple[float, float] | None


def main(command: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--expert", choices=PRESETS, default="qwen3-30b-a3b")
    parser.add_argument("--size", type=parse_bytes, default=2 * 10**9, help="of each of the two files, e.g. 2GB")
    parser.add_argument("--sets", type=parse_counts, default=(1, 4, 8, 32), help="experts read at once")
    parser.add_argument("--pairs", type=int, default=20, help="of each set; fewer where a file has too few experts")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="recordings to weigh the cold sets by")
    parser.add_argument(
        "--piece", type=parse_bytes, default=PIECE_BYTES, help="of one read of experts one by one, for more threads"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(command)
    model = PRESETS[arguments.expert]
    layers = max(1, arguments.size // model.layer_bytes)
    if max(arguments.sets) > model.experts or arguments.pairs < 2:
        parser.error(f"a set has at most the {model.experts} experts of a layer, and quartiles want two pairs")
    needed = HEADER_BYTES + layers * (model.layer_bytes + model.experts * model.block_bytes) + MARGIN_BYTES
    if (free := shutil.disk_usage(arguments.folder).free) < needed:
        parser.error(
            f"{arguments.folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed for two files of "
            f"{layers} layer(s) and a margin. Give a smaller --size or another --folder."
        )
    with ending_in_order(), tempfile.TemporaryDirectory(prefix="read-layouts-", dir=arguments.folder) as folder:
        files = Files(Path(folder), model, layers, arguments.seed)
        rows = [
            *measure_cold(files, arguments.sets, arguments.pairs, arguments.piece, random.Random(arguments.seed)),
            *measure_warm(files, arguments.sets, arguments.pairs, arguments.piece, random.Random(arguments.seed)),
        ]
        same = same_bytes(files)  # behind what must be cold
        python_us = python_only(files, arguments.pairs)
        nbytes = files.nbytes
    mixes = [mix for file in arguments.trace for mix in weigh(file, rows)]
    show(arguments.expert, rows, python_us, mixes)
    found = {
        "expert": arguments.expert,
        "expert_bytes": model.expert_bytes,
        "layers": layers,
        "piece_bytes": arguments.piece,
        "file_bytes": nbytes,
        "same_bytes": same,
        "rows": [asdict(row) for row in rows],
        "python_us": python_us,
        "mixes": mixes,
    }
    print(json.dumps(found))
    if not same:
        sys.exit("The two layouts gave different bytes: nothing above means anything.")


@contextmanager
def ending_in_order() -> Iterator[None]:
    """A process that is told to end, or whose terminal goes, still removes its files, as it does on Ctrl-C."""

    def end(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def same_bytes(files: Files) -> bool:
    """Whether an expert of each layer comes out alike from both files."""
    slots = [Slots(files.model, 1) for _ in LAYOUTS]
    for layer in range(files.layers):
        expert = layer * 7 % files.model.experts
        for layout, mine in enumerate(slots):
            for array in mine.arrays:
                array.fill(layout)  # what is not read is not alike
            reader = files.reader(layout)
            try:
                reader.read(mine.pieces(files, layout, layer, [expert]))
            finally:
                reader.close()
        if not all(map(np.array_equal, *(mine.arrays for mine in slots))):
            return False
    return True


def measure_cold(files: Files, counts: Sequence[int], pairs: int, piece: int, rng: random.Random) -> list[Row]:
    """Each expert is read once from each file; all sizes of sets by turns, so that a slow minute is everybody's."""
    unread = [rng.sample(range(files.model.experts), files.model.experts) for _ in range(files.layers)]
    found: dict[int, list[tuple[Once, Once]]] = {count: [] for count in counts}
    files.drop()
    with Bench(files, max(counts), piece) as bench:
        for number in track(range(pairs), "cold", console=Console(stderr=True), transient=True):
            for count in sorted(counts):  # the largest go without, where experts run out
                layers = [layer for layer, left in enumerate(unread) if len(left) >= count]
                if layers:
                    layer = rng.choice(layers)
                    experts = sorted(unread[layer].pop() for _ in range(count))
                    found[count].append(bench.pair(number, layer, experts))
    return [row_of("cold", files.model, count, found[count]) for count in counts if len(found[count]) > 1]


def measure_warm(files: Files, counts: Sequence[int], pairs: int, piece: int, rng: random.Random) -> list[Row]:
    """Both files' experts are read once just before."""
    found: dict[int, list[tuple[Once, Once]]] = {count: [] for count in counts}
    with Bench(files, max(counts), piece) as bench:
        for number in track(range(pairs), "warm", console=Console(stderr=True), transient=True):
            for count in counts:
                layer = rng.randrange(files.layers)
                experts = sorted(rng.sample(range(files.model.experts), count))
                bench.pair(number, layer, experts)
                found[count].append(bench.pair(number, layer, experts))
    return [row_of("warm", files.model, count, found[count]) for count in counts]


class Bench:
    """A reader of each layout, and one set of slots that both fill. `piece`: the most that is read at once by expert.

    The product's own limit is of no use where an expert is one piece below it: one thread reads, the others idle.
    """

    def __init__(self, files: Files, slots: int, piece: int) -> None:
        self._files = files
        self._pieces = (PIECE_BYTES, piece)
        self._bytes_from_disk = Machine().bytes_from_disk
        self._slots = Slots(files.model, slots)
        self._readers = [files.reader(layout) for layout in range(len(LAYOUTS))]

    def __enter__(self) -> Bench:
        gc.collect()
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        gc.enable()
        product.PIECE_BYTES = PIECE_BYTES
        for reader in self._readers:
            reader.close()

    def pair(self, number: int, layer: int, experts: Sequence[int]) -> tuple[Once, Once]:
        """Stacked and by expert; which is first alternates with `number`."""
        found: dict[int, Once] = {}
        for layout in (STACKED, BY_EXPERT) if number % 2 == 0 else (BY_EXPERT, STACKED):
            pieces = self._slots.pieces(self._files, layout, layer, experts)
            read = self._readers[layout].read
            product.PIECE_BYTES = self._pieces[layout]
            device, cpu, began = self._bytes_from_disk(), time.process_time(), time.perf_counter()
            read(pieces)
            seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
            after = self._bytes_from_disk()
            came = None if device is None or after is None else after - device
            found[layout] = Once(seconds, cpu_s, came)
        return found[STACKED], found[BY_EXPERT]


def python_only(files: Files, pairs: int) -> dict[str, tuple[float, float]]:
    """Microseconds of the reader's own work for an expert, by size of set: its system call moves nothing here."""

    def nothing(_: int, buffers: list[memoryview], __: int) -> int:
        return sum(map(len, buffers))

    found = {}
    for count in (1, min(8, files.model.experts)):
        slots, experts = (
            Slots(files.model, count),
            range(0, files.model.experts, files.model.experts // count)[:count],
        )
        times: tuple[list[float], list[float]] = ([], [])
        readers = [files.reader(layout, nothing) for layout in range(len(LAYOUTS))]
        for number in range(10 * pairs + 50):
            for layout, reader in enumerate(readers):
                pieces = slots.pieces(files, layout, 0, experts)
                began = time.perf_counter()
                reader.read(pieces)
                if number >= 50:  # until then the reader learns that it needs no threads
                    times[layout].append((time.perf_counter() - began) / count * 1e6)
        for reader in readers:
            reader.close()
        found[str(count)] = (statistics.median(times[STACKED]), statistics.median(times[BY_EXPERT]))
    return found


def row_of(state: str, model: Model, count: int, pairs: Sequence[tuple[Once, Once]]) -> Row:
    def both(value: Callable[[Once], float]) -> tuple[float, float]:
        return statistics.median(value(a) for a, _ in pairs), statistics.median(value(b) for _, b in pairs)

    ratios = [by_expert.seconds / stacked.seconds for stacked, by_expert in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    asked, came = count * model.expert_bytes * len(pairs), [0, 0]
    told = True
    for pair in pairs:
        for layout, once in enumerate(pair):
            told = told and once.device_bytes is not None
            came[layout] += once.device_bytes or 0
    return Row(
        state=state,
        count=count,
        pairs=len(pairs),
        ms=both(lambda once: once.seconds * 1e3),
        ratio=middle,
        quartiles=(low, high),
        cpu_us=both(lambda once: once.cpu_s / count * 1e6),
        device_to_asked=(came[STACKED] / asked, came[BY_EXPERT] / asked) if told else None,
    )


def weigh(file: Path, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Milliseconds of cold reads a token, of both layouts, with the sets that a recording misses; slots warmed by it.

    Sizes of sets between those measured are interpolated.
    """
    trace, cold = read_trace(file), [row for row in rows if row.state == "cold"]
    found: list[dict[str, Any]] = []
    if not cold:
        return found
    for share in (0.25, 0.5):
        start = len(trace.layers[0]) // 4  # the bank is empty at first
        sets: Counter[int] = Counter()
        for tokens in trace.layers:
            hits = replay(POLICIES[CHOSEN], tokens, trace.slots(share))
            sets.update(trace.top_k - hit for hit in hits[start:])
        token_count = sum(sets.values()) / len(trace.layers)
        lookups = sum(sets.values()) * trace.top_k
        del sets[0]
        ms = [
            sum(
                n * float(np.interp(size, [0, *(row.count for row in cold)], [0, *(row.ms[layout] for row in cold)]))
                for size, n in sets.items()
            )
            / token_count
            for layout in (STACKED, BY_EXPERT)
        ]
        found.append(
            {
                "trace": trace.name,
                "slots": share,
                "miss_rate": sum(size * n for size, n in sets.items()) / lookups,
                "sets_missed": {str(size): n / sum(sets.values()) for size, n in sorted(sets.items())},
                "ms_a_token": ms,
                "ratio": ms[BY_EXPERT] / ms[STACKED],
            }
        )
    return found


def show(
    expert: str, rows: Sequence[Row], python_us: dict[str, tuple[float, float]], mixes: Sequence[dict[str, Any]]
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(title=f"{expert}: {LAYOUTS[STACKED]}, {LAYOUTS[BY_EXPERT]}", title_justify="left")
    heads = ("", "experts", "pairs", "ms", "ratio", "quartiles", "device / asked", "CPU us an expert")
    for head in heads:
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for row in rows:
        device = "not told" if row.device_to_asked is None else "{:.3f}, {:.3f}".format(*row.device_to_asked)
        table.add_row(
            row.state,
            str(row.count),
            str(row.pairs),
            "{:.3f}, {:.3f}".format(*row.ms),
            f"{row.ratio:.3f}",
            "{:.3f} to {:.3f}".format(*row.quartiles),
            device,
            "{:.0f}, {:.0f}".format(*row.cpu_us),
        )
    console.print(table)
    for count, both in python_us.items():
        console.print("The reader's own Python, {} at once: {:.1f}, {:.1f} us an expert".format(count, *both))
    for mix in mixes:
        console.print(
            "{trace}, {slots:.0%} of the experts: {miss_rate:.1%} missed, {0:.1f}, {1:.1f} ms of cold reads a token, "
            "ratio {ratio:.3f}".format(*mix["ms_a_token"], **mix)
        )


def parse_bytes(text: str) -> int:
    units = {"kb": 10**3, "mb": 10**6, "gb": 10**9}
    scale = units.get(text[-2:].lower(), 1)
    nbytes = int(float(text[:-2] if scale > 1 else text) * scale)
    if nbytes <= 0:
        raise ValueError(text)
    return nbytes


def parse_counts(text: str) -> tuple[int, ...]:
    counts = tuple(sorted({int(part) for part in text.split(",")}))
    if counts[0] < 1:
        raise ValueError(text)
    return counts


if __name__ == "__main__":
    main()
