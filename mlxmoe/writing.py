"""Files that take their place only once they are whole. Knows bytes and names, not what is in them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import psutil

_LONGEST_NAME = 200  # bytes: file systems take 255, and a part's name has some 40 more


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A new file beside `path` that takes its place once it is whole. Raises OSError, and then it did not.

    Where `path` is a link, the place is that of the file it leads to. What is there and is no regular file (a folder,
    a pipe, a device) is refused. `durable`: and on the drive. Its new name is only after `keep_name`.
    """
    with contextlib.suppress(FileNotFoundError):
        refuse_special(path.stat().st_mode)
    path = _resolved(path)
    name = _part_name(path.name)
    remove_strays(path.parent, re.escape(name))
    part = path.parent / f".{name}.{os.getpid()}-{threading.get_ident()}.part"
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            if durable:
                _to_the_drive(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def keep_name(path: Path) -> None:
    """Return when the drive has the name of a file that took its place. Raises OSError."""
    folder = os.open(_resolved(path).parent, os.O_RDONLY)
    try:
        _to_the_drive(folder)
    finally:
        os.close(folder)


def remove_strays(folder: Path, name: str) -> None:
    """What processes that were killed while they wrote files of a `name`, a regular expression, left in `folder`.

    What cannot be removed stays: it stands in nobody's way.
    """
    stray = re.compile(rf"\.{name}\.(\d+)-\d+\.part")
    for found in folder.glob(".*.part"):
        if (match := stray.fullmatch(found.name)) and not psutil.pid_exists(int(match[1])):
            with contextlib.suppress(OSError):
                found.unlink(missing_ok=True)


def refuse_special(mode: int) -> None:
    """Raise OSError if `mode`, of os.stat, is not a regular file's."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "It is no regular file")


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for a loop before Python 3.13


def _part_name(name: str) -> str:
    """`name`, or what stands for it where it is so long that a part's name would be too long."""
    raw = os.fsencode(name)
    return name if len(raw) <= _LONGEST_NAME else f"{name[:40]}~{hashlib.blake2b(raw, digest_size=16).hexdigest()}"


def _to_the_drive(descriptor: int) -> None:
    """fsync; on macOS that only hands the bytes to the drive, and F_FULLFSYNC has it write them."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # not every file system there knows it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)
