"""Reads as benchmarks need them: counted, at a declared rate, plain in four threads, and a page cache to drop.

What stands in for `os.preadv` is called by the reader's threads at once. Knows nothing of models.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

Preadv = Callable[[int, list[memoryview], int], int]

PLAIN_THREADS = 4


@dataclass(frozen=True)
class Read:
    """One call: of which descriptor, from where, how many bytes came, and when."""

    descriptor: int
    offset: int
    nbytes: int
    began: float
    ended: float


class CountedReads:
    """A `preadv` that remembers its calls."""

    def __init__(self, preadv: Preadv = os.preadv) -> None:
        self._preadv = preadv
        self.reads: list[Read] = []

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        began = time.perf_counter()
        count = self._preadv(descriptor, buffers, offset)
        self.reads.append(Read(descriptor, offset, count, began, time.perf_counter()))  # appending is atomic
        return count

    @property
    def nbytes(self) -> int:
        return sum(read.nbytes for read in self.reads)

    @property
    def most_often(self) -> int:
        """How often the bytes at one place were read, at most."""
        return max(Counter((read.descriptor, read.offset) for read in self.reads).values(), default=0)

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one read was under way."""
        busy, until = 0.0, float("-inf")
        for read in sorted(self.reads, key=lambda read: read.began):
            busy += max(0.0, read.ended - max(read.began, until))
            until = max(until, read.ended)
        return busy

    def clear(self) -> None:
        self.reads.clear()


class DeclaredRate:
    """A `preadv` as slow as a disk of `bytes_per_s`: all threads together keep to the rate.

    The disk serves one read after the other on a clock of its own: a read that comes while it is busy begins when it
    is free. Each thread sleeps until its read is served, so a sleep that is too long delays its caller, not the disk.
    """

    def __init__(
        self,
        bytes_per_s: float,
        preadv: Preadv = os.preadv,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._preadv = preadv
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = float("-inf")

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        began = self._clock()
        count = self._preadv(descriptor, buffers, offset)
        with self._lock:
            self._free_at = served_at = max(began, self._free_at) + count / self._bytes_per_s
        if (left := served_at - self._clock()) > 0:
            self._sleep(left)
        return count


def plain_read_rate(reads: Sequence[Read]) -> float:
    """Bytes a second of the same reads by plain threads, each with a buffer of its own. The files must be open."""
    largest = max(read.nbytes for read in reads)

    def work(share: Sequence[Read]) -> None:
        buffer = memoryview(bytearray(largest))
        for read in share:
            done = 0
            while done < read.nbytes:
                count = os.preadv(read.descriptor, [buffer[done : read.nbytes]], read.offset + done)
                if count == 0:
                    raise OSError("A file ended before its reads were repeated.")
                done += count

    with ThreadPoolExecutor(PLAIN_THREADS) as pool:
        list(pool.map(time.sleep, [0.01] * PLAIN_THREADS))  # threads are started before the clock
        began = time.perf_counter()
        list(pool.map(work, [reads[first::PLAIN_THREADS] for first in range(PLAIN_THREADS)]))
        return sum(read.nbytes for read in reads) / (time.perf_counter() - began)


def can_drop_page_cache() -> bool:
    return hasattr(os, "posix_fadvise")


def drop_page_cache(folder: Path) -> None:
    """Let the system forget the cached pages of the weights in `folder`, and of nothing else."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not written yet is not dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def fill_page_cache(folder: Path) -> None:
    """Read every weight of `folder` once."""
    buffer = bytearray(2**22)
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
