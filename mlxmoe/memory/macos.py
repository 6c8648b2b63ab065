"""Asking macOS' C library: kernel values by name, and what this process has used. None for what it refuses."""

from __future__ import annotations

import ctypes
import os
from typing import Any

RUSAGE_INFO_V2 = 2  # sys/resource.h of macOS
TEXT_BYTES = 256  # of a kernel value that is text; those asked here are names


class RusageInfoV2(ctypes.Structure):
    """`struct rusage_info_v2` of macOS' sys/resource.h (since 10.9): times in ticks, sizes in bytes."""

    _fields_ = (
        ("ri_uuid", ctypes.c_uint8 * 16),
        ("ri_user_time", ctypes.c_uint64),
        ("ri_system_time", ctypes.c_uint64),
        ("ri_pkg_idle_wkups", ctypes.c_uint64),
        ("ri_interrupt_wkups", ctypes.c_uint64),
        ("ri_pageins", ctypes.c_uint64),
        ("ri_wired_size", ctypes.c_uint64),
        ("ri_resident_size", ctypes.c_uint64),
        ("ri_phys_footprint", ctypes.c_uint64),
        ("ri_proc_start_abstime", ctypes.c_uint64),
        ("ri_proc_exit_abstime", ctypes.c_uint64),
        ("ri_child_user_time", ctypes.c_uint64),
        ("ri_child_system_time", ctypes.c_uint64),
        ("ri_child_pkg_idle_wkups", ctypes.c_uint64),
        ("ri_child_interrupt_wkups", ctypes.c_uint64),
        ("ri_child_pageins", ctypes.c_uint64),
        ("ri_child_elapsed_abstime", ctypes.c_uint64),
        ("ri_diskio_bytesread", ctypes.c_uint64),
        ("ri_diskio_byteswritten", ctypes.c_uint64),
    )


class MacLibrary:
    """The calls of libSystem that are used here. `libc`: by default the running process's own."""

    def __init__(self, libc: Any = None) -> None:
        self._libc = ctypes.CDLL(None) if libc is None else libc

    def number(self, name: str) -> int | None:
        """A kernel value that is a number, of four or eight bytes, as `sysctl NAME` shows it."""
        found = self._value(name, 8)
        return int.from_bytes(found, "little") if found is not None and len(found) in (4, 8) else None

    def text(self, name: str) -> str | None:
        """A kernel value that is text."""
        found = self._value(name, TEXT_BYTES)
        return None if found is None else found.rstrip(b"\0").decode("utf-8", "replace")

    def usage(self) -> RusageInfoV2 | None:
        """What this process has used."""
        usage = RusageInfoV2()
        try:
            failed = self._libc.proc_pid_rusage(os.getpid(), RUSAGE_INFO_V2, ctypes.byref(usage))
        except (AttributeError, ctypes.ArgumentError):
            return None
        return None if failed else usage

    def _value(self, name: str, most_bytes: int) -> bytes | None:
        value = ctypes.create_string_buffer(most_bytes)
        size = ctypes.c_size_t(most_bytes)
        try:
            failed = self._libc.sysctlbyname(
                name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
            )
        except (AttributeError, ctypes.ArgumentError):
            return None
        return None if failed or size.value > most_bytes else value.raw[: size.value]
