"""Giving freed memory back to the operating system, which MLX and the C library both like to keep."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import mlx.core as mx


def release_freed() -> None:
    """Return MLX's pool of freed buffers, and what the C library keeps of them, to the system.

    On macOS Metal's buffers go back at once. glibc takes buffers of up to 32 MB from its heap once such ones have
    been freed, and keeps what is free in the middle of it: the process would stay as large as its banks ever were.
    """
    mx.clear_cache()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim(3), which no other C library has."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
