"""Asking the operating system and MLX about memory: one small method for each question, replaceable in tests.

The only place that asks. Every answer may be missing (None); none of the methods raises.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import psutil

from mlxmoe.memory.cgroup import CgroupMemory, MemoryCgroup, Stalls, parse_stalls
from mlxmoe.memory.macos import MacLibrary


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """The machine's own account. `available_bytes`: what it says can be had without swapping."""

    total_bytes: int
    available_bytes: int
    swap_used_bytes: int


@dataclass(frozen=True, slots=True)
class MlxMemory:
    """`active_bytes`: in arrays. `pool_bytes`: freed and kept for reuse. `peak_bytes`: the most that was active."""

    active_bytes: int
    pool_bytes: int
    peak_bytes: int


class Sources:
    """The machine this runs on. `platform`: as `sys.platform`; `root`: where /proc and /sys are.

    What cannot change while a process runs (where its control group is) is looked up once.
    """

    def __init__(self, platform: str = sys.platform, root: str = "/", mac: MacLibrary | None = None) -> None:
        self._platform = platform
        self._root = root
        self._mac = MacLibrary() if mac is None and platform == "darwin" else mac

    def machine(self) -> MachineMemory | None:
        """The machine's memory and swap."""
        if self._platform == "linux" and (found := parse_meminfo(self._read_text("/proc/meminfo") or "")):
            return found  # one file instead of the three that psutil reads
        try:
            memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        except (OSError, RuntimeError, ValueError, psutil.Error):
            return None
        return MachineMemory(int(memory.total), int(memory.available), int(swap.used))

    def pressure_level(self) -> int | None:
        """macOS' own level, `kern.memorystatus_vm_pressure_level`: 1 normal, 2 warning, 4 critical."""
        return None if self._mac is None else self._mac.number("kern.memorystatus_vm_pressure_level")

    def chip_brand(self) -> str | None:
        """The chip's name on a Mac, such as "Apple M4 Pro"."""
        return None if self._mac is None else self._mac.text("machdep.cpu.brand_string")

    def footprint_bytes(self) -> int | None:
        """What this process costs the machine: macOS' phys_footprint, Linux' anonymous memory and its swap."""
        if self._mac is not None:
            return None if (usage := self._mac.usage()) is None else int(usage.ri_phys_footprint)
        if self._platform == "linux":
            return parse_footprint(self._read_text("/proc/self/status") or "")
        try:
            return int(psutil.Process().memory_info().rss)
        except (OSError, psutil.Error):
            return None

    def stalls(self) -> Stalls | None:
        """Linux' pressure stall information of the whole machine."""
        if self._platform != "linux":
            return None
        return parse_stalls(self._read_text("/proc/pressure/memory") or "")

    def cgroup(self) -> CgroupMemory | None:
        """What Linux' control groups leave to this process; None where they set no limit."""
        return None if self._platform != "linux" else self._cgroup.read()

    def mlx(self) -> MlxMemory:
        """MLX's own counters of this process."""
        return MlxMemory(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())

    def working_set_bytes(self) -> int | None:
        """What the GPU recommends to keep at most; None where there is no GPU."""
        size = mx.device_info().get("max_recommended_working_set_size")
        return int(size) if size else None

    @cached_property
    def _cgroup(self) -> MemoryCgroup:
        return MemoryCgroup(self._read_text, lambda path: os.path.isdir(self._path(path)))

    def _path(self, path: str) -> str:
        return os.path.join(self._root, path.lstrip("/"))

    def _read_text(self, path: str) -> str | None:
        """A file of the kernel's as text; None where it cannot be read."""
        try:
            with open(self._path(path), "rb", buffering=0) as file:
                return file.readall().decode("utf-8", "replace")
        except (OSError, ValueError):
            return None


def parse_meminfo(text: str) -> MachineMemory | None:
    """/proc/meminfo, in kB; None where one of the lines is missing (MemAvailable is, before Linux 3.14)."""
    found = _kilobytes(text, ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree"))
    if len(found) < 4 or not found["MemTotal"]:
        return None
    available = min(found["MemAvailable"], found["MemTotal"])  # some containers show the host's beside their own
    return MachineMemory(found["MemTotal"], available, max(0, found["SwapTotal"] - found["SwapFree"]))


def parse_footprint(text: str) -> int | None:
    """/proc/self/status: anonymous memory, in memory or swapped out; files that are mapped cost nothing to drop."""
    found = _kilobytes(text, ("RssAnon", "VmSwap"))
    return found["RssAnon"] + found.get("VmSwap", 0) if "RssAnon" in found else None


def _kilobytes(text: str, names: tuple[str, ...]) -> dict[str, int]:
    """Lines of `Name:   123 kB` as bytes, those of `names` only."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name in names and len(words) == 2 and words[1] == "kB" and words[0].isdecimal() and len(words[0]) < 16:
            found[name] = int(words[0]) * 1024
    return found
