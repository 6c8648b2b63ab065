"""Reading pieces of files into memory: whole or not at all, whatever the disk does."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.errors import CheckpointReadError
from mlxmoe.experts.checkpoint import ExpertTensor
from mlxmoe.experts.reader import PIECE_BYTES, ExpertReader, Piece
from mlxmoe.experts.safetensors import FileState

SIZE = 3_000_000


@pytest.fixture(autouse=True)
def _threads_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for what one thread would rather read alone."""
    monkeypatch.setattr("mlxmoe.experts.reader.ALONE_S", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(SIZE))
    return path


def state(path: Path) -> dict[Path, FileState]:
    with path.open("rb") as opened:
        return {path: FileState.of(opened.fileno())}


def pieces(file: Path, target: bytearray, count: int) -> list[Piece]:
    step = len(target) // count
    view = memoryview(target)
    return [Piece(file, n * step, view[n * step : (n + 1) * step]) for n in range(count)]


def test_parallel_reads_fill_every_target(file: Path) -> None:
    target = bytearray(SIZE)
    ExpertReader(state(file)).read(pieces(file, target, 30))
    assert target == file.read_bytes()


def test_short_reads_are_continued(file: Path) -> None:
    def a_little(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(descriptor, [buffers[0][:1000]], offset)

    target = bytearray(SIZE)
    ExpertReader(state(file), preadv=a_little).read(pieces(file, target, 3))
    assert target == file.read_bytes()


def test_short_reads_that_end_between_two_neighbours_are_continued(file: Path) -> None:
    calls = []

    def a_little(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return os.preadv(descriptor, [*buffers[:1], *(buffer[:7] for buffer in buffers[1:2])], offset)

    target = bytearray(SIZE)
    ExpertReader(state(file), preadv=a_little).read(pieces(file, target, 300)[::-1])
    assert target == file.read_bytes()
    assert calls[0] == 300, "neighbours are read by one call"


def test_large_pieces_are_cut_for_all_threads(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(20_000_000))
    sizes: list[int] = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return os.preadv(descriptor, buffers, offset)

    target = bytearray(20_000_000)
    ExpertReader(state(path), preadv=preadv).read(pieces(path, target, 1))
    assert target == path.read_bytes()
    assert max(sizes) <= PIECE_BYTES == 4 * 2**20
    assert len(sizes) == 5


def scattered(file: Path, target: bytearray, count: int) -> list[Piece]:
    """Every other of the pieces, which therefore are no neighbours: each is a read of its own."""
    return pieces(file, target, 2 * count)[::2]


class Slow:
    """A preadv whose calls in the reader's threads wait until they are let go."""

    def __init__(self) -> None:
        self.let_go, self.begun = threading.Event(), threading.Semaphore(0)
        self.order: list[int] = []

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        self.order.append(offset)
        if threading.current_thread() is not threading.main_thread():
            self.begun.release()
            assert self.let_go.wait(5)
        return os.preadv(descriptor, buffers, offset)


def test_a_read_that_was_cut_short_is_settled(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C ends even the wait for the threads: none of them may write once everything is settled."""
    slow = Slow()
    reader, target = ExpertReader(state(file), preadv=slow), bytearray(SIZE)
    read = reader.start(scattered(file, target, 8))
    assert all(slow.begun.acquire(timeout=5) for _ in range(4))
    with monkeypatch.context() as patch:
        patch.setattr(reader._queue, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            read.wait()
    threading.Timer(0.1, slow.let_go.set).start()
    reader.settle()
    assert slow.let_go.is_set(), "it waited for the threads that were still writing"
    after = bytes(target)
    reader.close()
    assert bytes(target) == after


def test_what_is_waited_for_is_read_before_what_was_begun_early(file: Path) -> None:
    slow = Slow()
    reader, target = ExpertReader(state(file), threads=1, preadv=slow), bytearray(SIZE)
    parts = scattered(file, target, 6)
    early = [reader.start(parts[n : n + 1], early=True) for n in range(3)]
    assert slow.begun.acquire(timeout=5)
    demand = reader.start(parts[3:])
    early[2].hurry()
    slow.let_go.set()
    demand.wait()
    for read in early:
        read.wait()
    order = [[part.offset for part in parts].index(offset) for offset in slow.order]
    assert order[0] == 0, "it had begun"
    assert order.index(1) > max(order.index(n) for n in (3, 4, 5)), order
    assert order.index(2) < order.index(1), "it was in a hurry"
    assert all(part.target == file.read_bytes()[part.offset :][: len(part.target)] for part in parts)
    reader.close()


def test_more_threads_read_what_is_in_a_hurry_than_what_nobody_waits_for(file: Path) -> None:
    slow = Slow()
    reader, target = ExpertReader(state(file), threads=4, preadv=slow), bytearray(SIZE)
    read = reader.start(scattered(file, target, 6), early=True)
    assert all(slow.begun.acquire(timeout=5) for _ in range(2))
    assert not slow.begun.acquire(timeout=0.05)
    read.hurry()
    assert all(slow.begun.acquire(timeout=5) for _ in range(2)), "the other two threads"
    slow.let_go.set()
    read.wait()
    reader.close()


def test_a_dropped_read_writes_no_more(file: Path) -> None:
    slow = Slow()
    reader, target = ExpertReader(state(file), threads=2, preadv=slow), bytearray(SIZE)
    parts = scattered(file, target, 6)
    read = reader.start(parts, early=True)
    assert all(slow.begun.acquire(timeout=5) for _ in range(2))
    threading.Timer(0.1, slow.let_go.set).start()
    assert read.drop() == sum(len(part.target) for part in parts[2:])
    assert slow.let_go.is_set(), "two had begun"
    assert read.failed
    assert not read.ready
    after = bytes(target)
    reader.close()
    assert bytes(target) == after
    assert len(slow.order) == 2


def test_a_reader_that_was_forgotten_ends_its_threads(file: Path) -> None:
    gc.collect()
    before = resources()
    reader = ExpertReader(state(file))
    reader.read(scattered(file, bytearray(SIZE), 8))
    assert resources() > before
    del reader
    gc.collect()
    assert resources() == before


def test_where_no_thread_can_be_had_whoever_waits_reads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    reader, target = ExpertReader(state(file)), bytearray(SIZE)
    early = reader.start(pieces(file, target, 3), early=True)
    assert not early.ready
    early.wait()
    assert target == file.read_bytes()
    assert not reader._queue.early, "nobody would ever take it from there"


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_it_opens_files_as_macos_wants_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("mlxmoe.experts.reader.fcntl.fcntl", lambda _, command, value: calls.append((command, value)))
    target = bytearray(SIZE)
    ExpertReader(state(file)).read(pieces(file, target, 1))
    assert calls == [(45, 0)], "F_RDAHEAD off"
    assert target == file.read_bytes()


def test_a_failing_read_says_where_and_the_next_one_works(file: Path) -> None:
    failing = [True]

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if failing[0] and offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, buffers, offset)

    reader, target = ExpertReader(state(file), preadv=preadv), bytearray(SIZE)
    with pytest.raises(CheckpointReadError, match=rf"{file.name} failed: Input/output error"):
        reader.read(scattered(file, target, 4))
    failing[0] = False
    reader.read(pieces(file, target, 4))
    assert target == file.read_bytes()


def test_no_thread_writes_after_a_failed_read_returned(file: Path) -> None:
    slow = threading.Event()

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 0:
            raise OSError(errno.EIO, "broken")
        slow.wait(0.05)
        return os.preadv(descriptor, buffers, offset)

    target = bytearray(SIZE)
    with pytest.raises(CheckpointReadError):
        ExpertReader(state(file), preadv=preadv).read(scattered(file, target, 4))
    after = bytes(target)
    slow.wait(0.2)
    assert bytes(target) == after


def _truncate(file: Path) -> None:
    os.truncate(file, 10)


def _rewrite(file: Path) -> None:
    file.write_bytes(os.urandom(SIZE))
    os.utime(file, ns=(1, 1))


@pytest.mark.parametrize("change", [_truncate, _rewrite])
def test_a_file_that_changed_is_refused(file: Path, change: Callable[[Path], None]) -> None:
    reader, target = ExpertReader(state(file)), bytearray(SIZE)
    reader.read(pieces(file, target, 1))
    change(file)
    with pytest.raises(CheckpointReadError, match="changed while the model was in use"):
        reader.read(pieces(file, target, 1))


def test_a_file_replaced_by_rename_is_still_the_old_one(file: Path) -> None:
    reader, target = ExpertReader(state(file)), bytearray(SIZE)
    before = file.read_bytes()
    reader.read(pieces(file, target, 1))
    other = file.with_name("other")
    other.write_bytes(os.urandom(SIZE))
    other.rename(file)
    reader.read(pieces(file, target, 2))
    assert target == before


def test_a_file_that_is_gone_is_named(file: Path) -> None:
    reader = ExpertReader(state(file))
    file.unlink()
    with pytest.raises(CheckpointReadError, match="cannot be opened any more"):
        reader.read(pieces(file, bytearray(10), 1))


def test_an_early_end_of_file_is_an_error(file: Path) -> None:
    reader = ExpertReader(state(file))
    with pytest.raises(CheckpointReadError, match="5 bytes short"):
        reader.read([Piece(file, SIZE - 5, memoryview(bytearray(10)))])


def test_close_ends_threads_and_files(file: Path) -> None:
    reader = ExpertReader(state(file))
    gc.collect()  # other tests' readers
    before = resources()
    reader.read(scattered(file, bytearray(SIZE), 8))
    during = resources()
    reader.close()
    reader.close()
    assert during > before == resources()
    with pytest.raises(CheckpointReadError, match="closed"):
        reader.read(pieces(file, bytearray(10), 1))


def resources() -> tuple[int, int]:
    """Reader threads that live, and open files."""
    return sum("mlxmoe-read" in t.name for t in threading.enumerate()), len(os.listdir("/dev/fd"))


@given(
    cuts=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    left_out=st.sets(st.integers(0, 29)),
    order=st.randoms(use_true_random=False),
)
def test_every_piece_is_read_once_and_neighbours_together(cuts: list[int], left_out: set[int], order: Random) -> None:
    whole = bytes(range(256)) * 6
    ends = list(accumulate(cuts))
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxmoe.experts.reader.PIECE_BYTES", 64)
        path, calls = Path(folder) / "data", []

        def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            calls.append((offset, sum(map(len, buffers))))
            return os.preadv(descriptor, buffers, offset)

        path.write_bytes(whole)
        parts = [
            Piece(path, end - size, memoryview(bytearray(size)))
            for n, (end, size) in enumerate(zip(ends, cuts, strict=True))
            if n not in left_out
        ]
        order.shuffle(parts)
        reader = ExpertReader(state(path), preadv=preadv)
        reader.read(parts)
        reader.close()
    assert all(bytes(part.target) == whole[part.offset :][: len(part.target)] for part in parts)
    assert sum(size for _, size in calls) == sum(len(part.target) for part in parts)
    assert all(size <= 64 for _, size in calls)


def test_threads_are_woken_where_one_alone_is_slow_and_it_is_tried_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    pause, now = [0.002], [0.0]

    def disk(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        now[0] += pause[0]
        return os.preadv(descriptor, buffers, offset)

    monkeypatch.setattr("mlxmoe.experts.reader.time.perf_counter", lambda: now[0])

    reader = ExpertReader(state(file), preadv=disk)
    parts = scattered(file, bytearray(400_000), 8)
    while not reader._threads:
        reader.read(parts)
    slow = reader._queue.s_per_byte
    assert slow * 200_000 > 0.0005
    for _ in range(3):
        reader.read(parts)
    assert reader._queue.s_per_byte < slow, "what several share says nothing of one alone"
    pause[0] = 0.0
    for _ in range(1000):
        reader.read(parts)
    assert reader._queue.s_per_byte * 200_000 < 0.0005, "it is fast now, and was tried"
    reader.close()


def test_no_call_reads_more_pieces_than_the_system_takes(file: Path) -> None:
    target = bytearray(3000)
    reader = ExpertReader(state(file))
    reader.read([Piece(file, n, memoryview(target)[n : n + 1]) for n in range(3000)])
    assert target == file.read_bytes()[:3000]
    reader.close()


def test_stacked_experts_lie_one_behind_the_other() -> None:
    tensor = ExpertTensor.stacked(Path("x"), offset=100, nbytes=60, num_experts=3)
    assert (tensor.nbytes, list(tensor.offsets)) == (20, [100, 120, 140])
