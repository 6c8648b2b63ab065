"""Where each expert's bytes lie in the checkpoint's files, and reading them. Knows bytes and files, not MLX.

The reader's threads only ever move bytes into memory they were given; MLX's objects are not theirs to touch. The
files are the model's own: nothing is unpacked or stored a second time.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mlxmoe.errors import CheckpointReadError
from mlxmoe.experts.safetensors import FileState

READ_THREADS = 4  # parallel reads of 1-4 MB reach an SSD's rate with four threads
PIECE_BYTES = 4 * 2**20  # of one read: larger ones leave the other threads idle
INLINE_BYTES = 256 * 1024  # handing less than this to a thread costs more than reading it

# fcntl(2) on macOS, sys/fcntl.h; Python's fcntl module names it only since 3.13.
F_RDAHEAD = 45


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of a layer's experts as it lies on disk.

    `nbytes`: bytes of one expert's part. `files[e]`, `offsets[e]`: where expert `e`'s part starts.
    """

    nbytes: int
    files: Sequence[Path]
    offsets: Sequence[int]

    def __post_init__(self) -> None:
        assert len(self.files) == len(self.offsets), "one file and one offset for each expert"

    @classmethod
    def stacked(cls, file: Path, offset: int, nbytes: int, num_experts: int) -> ExpertTensor:
        """Experts one behind the other on axis 0, `nbytes` in all: MLX's own layout."""
        assert nbytes % num_experts == 0, "experts of one layer are of one size"
        stride = nbytes // num_experts
        return cls(stride, (file,) * num_experts, range(offset, offset + nbytes, stride))


class Piece(NamedTuple):
    """A run of bytes of a file and the memory it goes to (its length says how many)."""

    file: Path
    offset: int
    target: memoryview


def open_for_scattered_reads(path: Path) -> int:
    """Open `path` for reads of known pieces in no order: no read-ahead past each piece. Returns a descriptor.

    The page cache stays in use: it is the second-level cache that gives way by itself under pressure.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if sys.platform == "darwin":
            fcntl.fcntl(descriptor, F_RDAHEAD, 0)
        elif hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    except OSError:
        pass  # a hint: a file system without it still reads right
    return descriptor


class ExpertReader:
    """Reads pieces of checkpoint files in parallel, straight into the memory they are meant for.

    One caller at a time, which the passes over a model see to. `files`: each file's state when its header was read; a
    file that has changed since is refused.
    `preadv`: the system call, replaceable so that a test can make it fail.
    """

    def __init__(
        self,
        files: Mapping[Path, FileState],
        *,
        threads: int = READ_THREADS,
        preadv: Callable[[int, list[memoryview], int], int] = os.preadv,
    ) -> None:
        self._states = dict(files)
        self._threads = threads
        self._preadv = preadv
        self._descriptors: dict[Path, int] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._reading = False  # still set when a read begins: the one before failed or was cut short
        self._closed = False
        weakref.finalize(self, _close_descriptors, self._descriptors)

    @property
    def files(self) -> Mapping[Path, FileState]:
        """Each file's state when its header was read."""
        return self._states

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill every piece's target. Modifies the targets; on an error their contents are undefined.

        Returns or raises only when no thread writes to any target any more. Where even that wait is cut short (a
        second Ctrl-C), the next call waits first. Raises CheckpointReadError.
        """
        self._settle()
        if self._closed:
            raise CheckpointReadError("The expert reader is closed; load the model again.")
        for path in {piece.file for piece in pieces}:
            self._refuse_changed(path)
        mine, *others = split_evenly(pieces, self._shares(pieces))
        self._reading = True
        futures: list[Future[None]] = []
        try:
            for share in others:
                futures.append(self._submit(share))
            self._read_share(mine)
        finally:
            wait(futures)
        for future in futures:
            future.result()
        self._reading = False

    def close(self) -> None:
        """Wait for reads under way, end the threads, close the files. May be called twice."""
        self._closed = True
        self._end_pool()
        _close_descriptors(self._descriptors)

    def _settle(self) -> None:
        """Wait for whatever a read that failed or was cut short may have left running, known to us or not."""
        if self._reading:
            self._end_pool()
        self._reading = False

    def _end_pool(self) -> None:
        """Wait for the threads' work, and end them."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _shares(self, pieces: Sequence[Piece]) -> int:
        if sum(len(piece.target) for piece in pieces) <= INLINE_BYTES:
            return 1
        return self._threads

    def _submit(self, share: Sequence[Piece]) -> Future[None]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="mlxmoe-read")
        try:
            return self._pool.submit(self._read_share, share)
        except RuntimeError as error:
            raise CheckpointReadError(
                f"No thread can be started to read experts ({error}). Raise the limit on threads, or end programs."
            ) from error

    def _refuse_changed(self, path: Path) -> None:
        try:
            if path not in self._descriptors:
                self._descriptors[path] = open_for_scattered_reads(path)
            now = FileState.of(self._descriptors[path])
        except OSError as error:
            raise CheckpointReadError(
                f"{path} cannot be opened any more: {error.strerror or error}. Is its disk still there?"
            ) from error
        if now != (then := self._states[path]):
            raise CheckpointReadError(
                f"{path} changed while the model was in use: it had {then.size_bytes} bytes, now {now.size_bytes}"
                f"{'' if now.size_bytes != then.size_bytes else ', and a newer time of change'}. "
                f"Load the model again."
            )

    def _read_share(self, pieces: Sequence[Piece]) -> None:
        for path, offset, target in pieces:
            done = 0
            while done < len(target):
                try:
                    count = self._preadv(self._descriptors[path], [target[done:]], offset + done)
                except OSError as error:
                    raise CheckpointReadError(
                        f"Reading {len(target)} bytes at {offset} of {path} failed: {error.strerror or error}. "
                        f"Nothing was lost: the next request reads them again."
                    ) from error
                if count == 0:
                    raise CheckpointReadError(
                        f"{path} ended at byte {offset + done}, {len(target) - done} bytes short of an expert. "
                        f"Was it truncated? Load the model again."
                    )
                done += count


def _close_descriptors(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def split_evenly(pieces: Sequence[Piece], shares: int) -> list[list[Piece]]:
    """Deal `pieces` into `shares` lists of about equal bytes, the largest first (longest-processing-time rule)."""
    if shares == 1:
        return [list(pieces)]
    dealt: list[list[Piece]] = [[] for _ in range(shares)]
    loads = [(0, share) for share in range(shares)]
    for piece in sorted(_cut(pieces), key=lambda piece: len(piece.target), reverse=True):
        load, share = heapq.heappop(loads)
        dealt[share].append(piece)
        heapq.heappush(loads, (load + len(piece.target), share))
    return dealt


def _cut(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The same bytes in pieces of at most PIECE_BYTES."""
    for path, offset, target in pieces:
        for start in range(0, len(target), PIECE_BYTES):
            yield Piece(path, offset + start, target[start : start + PIECE_BYTES])
