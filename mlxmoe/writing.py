"""Files that take their place only once they are whole. Knows bytes and names, not what is in them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import psutil


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A new file beside `path` that takes its place once it is whole. Raises OSError, and then it did not.

    `durable`: and on the drive. Its new name is only after `keep_name`.
    """
    remove_strays(path.parent, re.escape(path.name))
    part = path.parent / f".{path.name}.{os.getpid()}-{threading.get_ident()}.part"
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
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        _to_the_drive(folder)
    finally:
        os.close(folder)


def remove_strays(folder: Path, name: str) -> None:
    """What processes that were killed while they wrote files of a `name`, a regular expression, left in `folder`."""
    stray = re.compile(rf"\.{name}\.(\d+)-\d+\.part")
    for found in folder.glob(".*.part"):
        if (match := stray.fullmatch(found.name)) and not psutil.pid_exists(int(match[1])):
            found.unlink(missing_ok=True)


def _to_the_drive(descriptor: int) -> None:
    """fsync; on macOS that only hands the bytes to the drive, and F_FULLFSYNC has it write them."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # not every file system there knows it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)
