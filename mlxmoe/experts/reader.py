"""Reading pieces of files into memory, several at once and in the background. Knows bytes and files, not MLX.

The threads only ever move bytes into memory they were given; MLX's objects are not theirs to touch. The files are the
model's own: nothing is unpacked or stored a second time.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from mlxmoe.errors import CheckpointReadError
from mlxmoe.experts.safetensors import FileState

READ_THREADS = 4  # parallel reads of 1-4 MB reach an SSD's rate with four threads
EARLY_THREADS = 2  # of them at most for what nobody waits for yet: what they have begun delays what somebody does
PIECE_BYTES = 4 * 2**20  # of one read: larger ones leave the other threads idle
MOST_TARGETS = 512  # of one system call, which takes 1024 on Linux and macOS (IOV_MAX)
ALONE_S = 0.5e-3  # what whoever waits reads alone in this time is not worth waking threads for
FORGET = 0.99  # how much of the pace of one thread alone is believed after each read that several shared

# fcntl(2) on macOS, sys/fcntl.h; Python's fcntl module names it only since 3.13.
F_RDAHEAD = 45

Preadv = Callable[[int, list[memoryview], int], int]


class Piece(NamedTuple):
    """A run of bytes of a file and the memory it goes to (its length says how many)."""

    file: Path
    offset: int
    target: memoryview


# Pieces that lie one behind the other in a file, for one system call: descriptor, offset, targets.
_Run = tuple[int, int, list[memoryview]]


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


class Read:
    """Pieces under way. Only the thread that started it may call its methods."""

    def __init__(self, queue: _Queue, runs: Sequence[_Run], *, early: bool, shared: bool) -> None:
        self.early = early
        self._queue = queue
        self._shared = shared  # with the reader's threads
        self._count = len(runs)
        self.waiting = deque(runs)  # guarded by the queue's lock, as are the next four
        self.left = len(runs)
        self.running = 0  # in the reader's threads
        self.error: BaseException | None = None
        self.dropped = False

    @property
    def ready(self) -> bool:
        """Whether every target holds its bytes."""
        return self.left == 0

    @property
    def failed(self) -> bool:
        """Whether it will never be ready."""
        return self.dropped or self.error is not None

    def hurry(self) -> None:
        """It was started early, and is needed now."""
        self._queue.hurry(self)

    def withdraw(self) -> bool:
        """Drop it unless it has begun: then False, and nothing. Where True no target was or will be written to."""
        return self._queue.withdraw(self, self._count)

    def wait(self) -> None:
        """Take part in the reading until it is done. Raises CheckpointReadError; then no thread writes any more."""
        queue = self._queue
        start, nbytes = time.perf_counter(), 0
        try:
            while (run := queue.take_of(self)) is not None:
                queue.fill(run)
                queue.one_less(self)
                nbytes += _length(run[2])
            if nbytes and not self._shared:
                queue.note_pace(nbytes, time.perf_counter() - start)
            queue.wait_for(self)
        except BaseException:  # Ctrl-C too
            self.drop()
            raise
        if self.error is not None:
            raise self.error
        assert self.ready, "a dropped read is waited for by nobody"

    def drop(self) -> int:
        """Read no more of it. When this returns no thread writes to any target any more; bytes that were not read."""
        unread = self._queue.drop(self)
        self._queue.wait_for(self)
        return unread


class _Queue:
    """What is to be read, for the threads: they know nothing else, so that none keeps a reader alive.

    The lock is entered itself, never through a condition, or Ctrl-C could leave it locked.
    """

    def __init__(self, preadv: Preadv) -> None:
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)
        self.done = threading.Condition(self.lock)
        self.demand: deque[Read] = deque()
        self.early: deque[Read] = deque()
        self.paths: dict[int, Path] = {}
        self.running = 0
        self.running_early = 0  # of those, what was begun while nobody waited for it
        self.closed = False
        self.s_per_byte = 1e-9  # of one thread alone, lately
        self._preadv = preadv

    def put(self, read: Read, *, wake: int) -> None:
        with self.lock:
            (self.early if read.early else self.demand).append(read)
            self.work.notify(wake)

    def take_of(self, read: Read) -> _Run | None:
        with self.lock:
            return read.waiting.popleft() if read.waiting else None

    def note_pace(self, nbytes: int, seconds: float) -> None:
        """Of a read by one thread alone. Small ones say little, and a megabyte as much as all that came before."""
        weight = min(nbytes / 2**20, 0.5)
        self.s_per_byte += weight * (seconds / nbytes - self.s_per_byte)

    def one_less(self, read: Read) -> None:
        with self.lock:
            read.left -= 1

    def hurry(self, read: Read) -> None:
        with self.lock:
            if read in self.early:
                self.early.remove(read)
                self.demand.appendleft(read)
                self.work.notify(len(read.waiting))  # more threads read this than what nobody waits for

    def drop(self, read: Read) -> int:
        with self.lock:
            read.dropped = True
            unread = sum(_length(targets) for _, _, targets in read.waiting)
            read.waiting.clear()
            return unread

    def withdraw(self, read: Read, runs: int) -> bool:
        with self.lock:
            if len(read.waiting) < runs:
                return False
            read.dropped = True
            read.waiting.clear()
            return True

    def wait_for(self, read: Read) -> None:
        """Until no thread works on `read`."""
        with self.lock:
            while read.running:
                self.done.wait()

    def settle(self) -> None:
        """Drop everything, and return when no thread writes to anything any more."""
        with self.lock:
            for read in (*self.demand, *self.early):
                read.dropped = True
                read.waiting.clear()
            while self.running:
                self.done.wait()

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.work.notify_all()

    def serve(self) -> None:
        """What a thread does: one run after the other, those that are waited for first."""
        while (taken := self._next()) is not None:
            read, run, early = taken
            error: BaseException | None = None
            try:
                self.fill(run)
            except BaseException as failure:  # it is for whoever waits for it
                error = failure
            del run, taken  # no view of a bank stays behind while the thread waits
            with self.lock:
                read.running -= 1
                self.running -= 1
                self.running_early -= early
                if error is None:
                    read.left -= 1
                else:
                    read.error = read.error or error
                    read.waiting.clear()
                if not read.running or not self.running:
                    self.done.notify_all()
            del read, error

    def fill(self, run: _Run) -> None:
        """Raises CheckpointReadError."""
        descriptor, offset, targets = run
        targets = list(targets)
        while targets:
            try:
                count = self._preadv(descriptor, targets, offset)
            except OSError as error:
                raise CheckpointReadError(
                    f"Reading {_length(targets)} bytes at {offset} of {self.paths[descriptor]} failed: "
                    f"{error.strerror or error}. Nothing was lost: the next request reads them again."
                ) from error
            if count == 0:
                raise CheckpointReadError(
                    f"{self.paths[descriptor]} ended at byte {offset}, {_length(targets)} bytes short of an expert. "
                    f"Was it truncated? Load the model again."
                )
            offset += count
            while targets and count >= len(targets[0]):
                count -= len(targets.pop(0))
            if count:
                targets[0] = targets[0][count:]

    def _next(self) -> tuple[Read, _Run, bool] | None:
        """What a thread is to read next, and whether nobody waits for it yet. None once the queue is closed."""
        with self.lock:
            while not self.closed:
                for reads in (self.demand, self.early):
                    early = reads is self.early
                    if early and self.running_early >= EARLY_THREADS:
                        break  # those that read it go on with the rest
                    while reads:
                        read = reads[0]
                        if read.waiting:
                            read.running += 1
                            self.running += 1
                            self.running_early += early
                            return read, read.waiting.popleft(), early
                        reads.popleft()
                self.work.wait()
            return None


class ExpertReader:
    """Reads pieces of checkpoint files, straight into the memory they are meant for.

    One caller at a time, which the passes over a model see to. `files`: each file's state when its header was read; a
    file that has changed since is refused. `preadv`: the system call, replaceable so that a test can make it fail.
    """

    def __init__(
        self, files: Mapping[Path, FileState], *, threads: int = READ_THREADS, preadv: Preadv = os.preadv
    ) -> None:
        self._states = dict(files)
        self._queue = _Queue(preadv)
        self._descriptors: dict[Path, int] = {}
        self._most_threads = threads
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, self._queue, self._threads, self._descriptors, os.getpid())

    @property
    def files(self) -> Mapping[Path, FileState]:
        """Each file's state when its header was read."""
        return self._states

    def start(self, pieces: Sequence[Piece], *, early: bool = False) -> Read:
        """Begin to fill every piece's target; they must outlive the read, whose `wait` or `drop` ends it.

        `early`: nobody waits for it yet, and what is waited for goes first. Raises CheckpointReadError.
        """
        if self._queue.closed:
            raise CheckpointReadError("The expert reader is closed; load the model again.")
        for path in {piece.file for piece in pieces}:
            self._refuse_changed(path)
        runs = _runs([(self._descriptors[piece.file], piece.offset, piece.target) for piece in pieces])
        alone_s = self._queue.s_per_byte * sum(len(piece.target) for piece in pieces)
        shared = early or alone_s > ALONE_S
        read = Read(self._queue, runs, early=early, shared=shared)
        if shared and not early:
            self._queue.s_per_byte *= FORGET  # so that one thread alone is tried again now and then
        if shared and self._have_threads(len(runs)):
            self._queue.put(read, wake=len(runs))
        return read

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill every piece's target. On an error their contents are undefined. Raises CheckpointReadError."""
        self.start(pieces).wait()

    def settle(self) -> None:
        """Drop every read; when this returns no thread writes to any target any more."""
        self._queue.settle()

    def close(self) -> None:
        """Drop every read, end the threads, close the files. May be called twice."""
        self._queue.settle()
        self._end()
        _end(self._queue, self._threads, self._descriptors, os.getpid())  # again, where Ctrl-C cut the first short

    def _have_threads(self, count: int) -> bool:
        """Up to `count` threads, fewer where the system gives none: whoever waits reads too. Whether any are."""
        while len(self._threads) < min(count, self._most_threads):
            thread = threading.Thread(target=self._queue.serve, name="mlxmoe-read", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)
        return bool(self._threads)

    def _refuse_changed(self, path: Path) -> None:
        try:
            if path not in self._descriptors:
                descriptor = self._descriptors[path] = open_for_scattered_reads(path)
                self._queue.paths[descriptor] = path
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


def _end(queue: _Queue, threads: list[threading.Thread], descriptors: dict[Path, int], process: int) -> None:
    if os.getpid() != process:
        return  # a fork has none of the threads, and perhaps a lock that nobody will ever let go
    queue.close()
    while threads:
        threads[-1].join()
        threads.pop()
    while descriptors:
        os.close(descriptors.popitem()[1])


def _runs(pieces: list[tuple[int, int, memoryview]]) -> list[_Run]:
    """(descriptor, offset, target) in the files' order; neighbours together, in runs of at most PIECE_BYTES."""
    runs: list[_Run] = []
    end, room = (-1, -1), 0  # where a piece must begin to join the last run, and how much of that may grow
    for descriptor, offset, whole in sorted(pieces, key=itemgetter(0, 1)):
        for start in range(0, len(whole), PIECE_BYTES):
            target = whole if len(whole) <= PIECE_BYTES else whole[start : start + PIECE_BYTES]
            size = len(target)
            if size <= room and end == (descriptor, offset) and len(runs[-1][2]) < MOST_TARGETS:
                runs[-1][2].append(target)
                room -= size
            else:
                runs.append((descriptor, offset, [target]))
                room = PIECE_BYTES - size
            offset += size
            end = (descriptor, offset)
    return runs


def _length(targets: Sequence[memoryview]) -> int:
    return sum(map(len, targets))
