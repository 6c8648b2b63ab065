"""How fast a model's own files can be read, the way misses read them: scattered pieces of experts, four at a time."""

from __future__ import annotations

import fcntl
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mlxmoe.experts.reader import PIECE_BYTES, READ_THREADS, open_for_scattered_reads
from mlxmoe.experts.safetensors import Checkpoint, TensorInfo

MEASURE_S = 2.0
MOST_BYTES = 16 * 10**9  # more than the fastest disk gives in that time
LEAST_BYTES = 64 * 2**20  # of less than this, the rate says nothing
COLD_SHARE = 0.9  # of what was read, from the disk: then the rate is the disk's

F_NOCACHE = 48  # fcntl(2) on macOS; Python's fcntl module names it on macOS only

_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class ReadRate:
    """What was read in how long, in pieces of `piece_bytes`.

    `disk_share`: the share of it that came from the disk and not from the page cache; None where the system does not
    tell. Misleads: a disk, a hypervisor or a file server has caches of its own.
    """

    bytes_read: int
    seconds: float
    piece_bytes: int
    disk_share: float | None

    @property
    def bytes_per_s(self) -> float:
        return self.bytes_read / self.seconds

    @property
    def cold(self) -> bool:
        """Whether the rate is known to be the disk's."""
        return self.disk_share is not None and self.disk_share >= COLD_SHARE


def measure_read_rate(
    checkpoint: Checkpoint, bytes_from_disk: Callable[[], int | None], seconds: float = MEASURE_S
) -> ReadRate | None:
    """Read expert pieces for at most `seconds`, each once, past the page cache where the system lets us.

    `bytes_from_disk`: what this process has had read from disks so far. None where the model is too small to tell.
    On Linux the files are first dropped from the page cache (pieces alone would not be: a folio goes whole or not at
    all); on macOS they stay there, and what is read is not added. Raises OSError.
    """
    pieces = expert_pieces(checkpoint)
    if sum(size for _, _, size in pieces) < LEAST_BYTES:
        return None
    descriptors: dict[Path, int] = {}
    try:
        for path in {path for path, _, _ in pieces}:
            descriptors[path] = _open_past_cache(path)
        before, start = bytes_from_disk(), time.perf_counter()
        shared = iter(pieces)  # a list's iterator may be shared by threads

        def read_until_time_is_up(_: int) -> int:
            buffer, done = memoryview(bytearray(PIECE_BYTES)), 0
            for path, offset, size in shared:
                if time.perf_counter() - start > seconds:
                    break
                done += os.preadv(descriptors[path], [buffer[:size]], offset)
            return done

        with ThreadPoolExecutor(READ_THREADS) as pool:
            done = sum(pool.map(read_until_time_is_up, range(READ_THREADS)))
        took, after = time.perf_counter() - start, bytes_from_disk()
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    share = None if before is None or after is None or not done else min(1.0, (after - before) / done)
    return ReadRate(done, took, max(size for _, _, size in pieces), share)


def expert_pieces(checkpoint: Checkpoint) -> list[tuple[Path, int, int]]:
    """File, offset and bytes of pieces in random order, of routed experts where the names or shapes tell them."""
    tensors = list(checkpoint.tensors.values())
    runs = [(tensor, _expert_bytes(tensor)) for tensor in tensors]
    largest = max((size for _, size in runs if size), default=0)
    # Scales and biases are read along with the weights: they would only add to the number of small reads.
    chosen = [(tensor, size) for tensor, size in runs if size and size * 4 >= largest]
    chosen = chosen or [(tensor, tensor.nbytes) for tensor in tensors if tensor.nbytes]
    random.shuffle(chosen)
    pieces: list[tuple[Path, int, int]] = []
    total = 0
    for tensor, size in chosen:
        if total > MOST_BYTES:
            break
        pieces.extend(_cut(tensor, size))
        total += tensor.nbytes
    random.shuffle(pieces)
    return pieces


def _expert_bytes(tensor: TensorInfo) -> int:
    """Bytes of one expert's part of a tensor; 0 where name and shape do not say that it is of experts."""
    if _ONE_EXPERT.search(tensor.name):
        return tensor.nbytes
    return tensor.nbytes // tensor.shape[0] if len(tensor.shape) == 3 and tensor.shape[0] > 1 else 0


def _cut(tensor: TensorInfo, size: int) -> Iterator[tuple[Path, int, int]]:
    """The tensor in parts of `size` bytes, and these in pieces as the reader of experts reads them."""
    end = tensor.offset + tensor.nbytes
    for part in range(tensor.offset, end, size):
        for start in range(part, min(part + size, end), PIECE_BYTES):
            yield tensor.file, start, min(PIECE_BYTES, part + size - start, end - start)


def _open_past_cache(path: Path) -> int:
    descriptor = open_for_scattered_reads(path)
    try:
        if sys.platform == "darwin":
            fcntl.fcntl(descriptor, F_NOCACHE, 1)
        elif hasattr(os, "posix_fadvise"):
            os.fdatasync(descriptor)  # what was just downloaded may not be on disk yet, and such pages stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        pass  # a file system without it: the share that came from the disk tells
    return descriptor
