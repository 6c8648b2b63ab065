"""Reading pieces of files into memory: whole or not at all, whatever the disk does."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.errors import CheckpointReadError
from mlxmoe.experts.checkpoint import ExpertReader, ExpertTensor, Piece, split_evenly
from mlxmoe.experts.safetensors import FileState

SIZE = 3_000_000


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


def test_large_pieces_are_cut_for_all_threads(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(20_000_000))
    sizes: list[int] = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(len(buffers[0]))
        return os.preadv(descriptor, buffers, offset)

    target = bytearray(20_000_000)
    ExpertReader(state(path), preadv=preadv).read(pieces(path, target, 1))
    assert target == path.read_bytes()
    assert max(sizes) <= 4 * 2**20
    assert len(sizes) == 5


def test_a_read_cut_short_is_waited_for_by_the_next(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C ends even the wait for the threads: none of them may write once the next read has begun."""
    late = threading.Event()
    first = [True]

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if first[0] and threading.current_thread() is not threading.main_thread():
            late.wait(5)
        return os.preadv(descriptor, buffers, offset)

    reader, target = ExpertReader(state(file), preadv=preadv), bytearray(SIZE)
    with monkeypatch.context() as patch:
        patch.setattr("mlxmoe.experts.checkpoint.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            reader.read(pieces(file, target, 4))
    first[0] = False
    threading.Timer(0.1, late.set).start()
    reader.read([Piece(file, 0, memoryview(target)[:10])])
    assert late.is_set(), "the next read waited for the threads that were still writing"
    assert target == file.read_bytes()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_it_opens_files_as_macos_wants_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(
        "mlxmoe.experts.checkpoint.fcntl.fcntl", lambda _, command, value: calls.append((command, value))
    )
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
        reader.read(pieces(file, target, 4))
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
        ExpertReader(state(file), preadv=preadv).read(pieces(file, target, 4))
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
    reader.read(pieces(file, bytearray(SIZE), 8))
    during = resources()
    reader.close()
    reader.close()
    assert during > before == resources()
    with pytest.raises(CheckpointReadError, match="closed"):
        reader.read(pieces(file, bytearray(10), 1))


def resources() -> tuple[int, int]:
    """Reader threads that live, and open files."""
    return sum("mlxmoe-read" in t.name for t in threading.enumerate()), len(os.listdir("/dev/fd"))


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30), shares=st.integers(1, 5))
def test_shares_hold_every_piece_once_and_are_even(sizes: list[int], shares: int) -> None:
    dealt = split_evenly([Piece(Path("x"), n, memoryview(bytearray(size))) for n, size in enumerate(sizes)], shares)
    assert sorted(piece.offset for share in dealt for piece in share) == list(range(len(sizes)))
    loads = [sum(len(piece.target) for piece in share) for share in dealt]
    assert max(loads) - min(loads) <= max(sizes)


def test_stacked_experts_lie_one_behind_the_other() -> None:
    tensor = ExpertTensor.stacked(Path("x"), offset=100, nbytes=60, num_experts=3)
    assert (tensor.nbytes, list(tensor.offsets)) == (20, [100, 120, 140])
