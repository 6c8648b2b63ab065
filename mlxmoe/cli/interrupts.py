"""What Ctrl-C does, from the first moment on. Knows no command.

Python raises KeyboardInterrupt wherever it happens to be. Within an import that is no use: callbacks of the import
system show it as a traceback and go on, and modules that try what they can import take it for a failure. There is
nothing to put in order either, so until a command works, after it, and wherever it imports, the process ends at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # the exit code


def end_at_once() -> None:
    """From now on Ctrl-C ends the process, unless whoever started it wanted Ctrl-C ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


@contextmanager
def raised() -> Iterator[None]:
    """Within, Ctrl-C raises KeyboardInterrupt, save in the middle of an import. Nothing where it does so anyway."""
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


def _raise(signum: int, frame: FrameType | None) -> None:
    within = frame
    while within is not None:
        if within.f_code.co_filename.startswith("<frozen importlib"):
            _end(signum, frame)
        within = within.f_back
    raise KeyboardInterrupt


def _end(signum: int, frame: FrameType | None) -> None:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # shows the cursor, which a progress bar hides
    os._exit(INTERRUPTED)
