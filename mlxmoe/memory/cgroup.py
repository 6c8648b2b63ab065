"""The memory limit that control groups set for this process (Linux). Knows the kernel's files and formats only.

Formats: proc(5) for /proc/self/cgroup and mountinfo; the kernel's cgroup-v1/memory.rst and cgroup-v2.rst for the
rest. Nothing here trusts a file: what is absent, unreadable or malformed counts as not there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# A file's text, or None where it cannot be read.
ReadText = Callable[[str], str | None]

UNLIMITED_BYTES = 2**60  # v1 writes "no limit" as the largest multiple of a page below 2**63

_NUMBER = re.compile(r"[0-9]+", re.ASCII)
_OCTAL = re.compile(r"\\([0-7]{3})", re.ASCII)
_STALL = re.compile(r"^(some|full) avg10=([0-9]{1,3}\.[0-9]+)\b", re.MULTILINE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Stalls:
    """Pressure stall information: the share (0 to 1) of the last ten seconds lost to waiting for memory.

    `some`: at least one task waited. `full`: all tasks that had work waited at once. The kernel brings them up to
    date every two seconds. Misleads: reading again what the page cache had dropped counts, so streaming experts from
    disk through a small page cache shows here although nothing is wrong.
    """

    some: float
    full: float


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """What the control groups leave to this process.

    `limit_bytes`: the tightest limit among its own group's and those of all above it. `available_bytes`: the least
    room below any of these limits; file cache that can be dropped counts as room. It may be another group's than the
    tightest limit's: a sibling may fill a larger one. `stalls`: of this process's own group, where the kernel counts
    them (v2).
    """

    limit_bytes: int
    available_bytes: int
    stalls: Stalls | None


@dataclass(frozen=True, slots=True)
class _Files:
    """What the two versions call the same things. `droppable`, `held_up`: of memory.stat, the latter not yet room."""

    limits: tuple[str, ...]
    usage: str
    droppable: tuple[str, ...]
    held_up: tuple[str, ...]


# v1's `total_` sums include the groups below, as its usage does. Dirty pages have to be written before they are room.
_V1 = _Files(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    ("total_dirty", "total_writeback"),
)
# memory.high throttles a process nearly to a standstill: as good as a limit to whoever wants to be fast.
_V2 = _Files(
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file", "slab_reclaimable"),
    ("file_dirty", "file_writeback"),
)


class MemoryCgroup:
    """This process's control group for memory and those above it, found once: a process seldom moves."""

    def __init__(self, read_text: ReadText, is_folder: Callable[[str], bool]) -> None:
        self._read_text = read_text
        own = parse_own_groups(read_text("/proc/self/cgroup") or "")
        mounts = parse_mounts(read_text("/proc/self/mountinfo") or "")
        self._files, self._folders = _V2, list[str]()  # from the process's own group upward
        for version, files in ((1, _V1), (2, _V2)):
            if version in own and version in mounts:
                self._files, self._folders = files, _folders(own[version], mounts[version], is_folder)
                break  # the memory controller is in one hierarchy only, and v1 names it where it has it
        self._hidden_bytes = self._hidden_limit()

    def read(self) -> CgroupMemory | None:
        """The limit and the room below it now; None where nothing limits this process."""
        limits, rooms = [], []
        for folder in self._folders:
            limit = self._limit(folder)
            if limit is None:
                continue
            limits.append(limit)
            usage = parse_number(self._read_text(f"{folder}/{self._files.usage}") or "")
            if usage is not None:
                rooms.append(max(0, min(limit, limit - usage + self._droppable(folder, usage))))
        if not limits:
            return None
        stalls = parse_stalls(self._read_text(f"{self._folders[0]}/memory.pressure") or "")
        return CgroupMemory(min(limits), min([*rooms, *limits]), stalls)

    def _limit(self, folder: str) -> int | None:
        texts = (self._read_text(f"{folder}/{name}") for name in self._files.limits)
        limits = [limit for text in texts if (limit := parse_number(text or "")) is not None]
        if self._hidden_bytes is not None and folder == self._folders[-1]:
            limits.append(self._hidden_bytes)
        least = min(limits, default=UNLIMITED_BYTES)
        return least if least < UNLIMITED_BYTES else None

    def _droppable(self, folder: str, usage: int) -> int:
        stat = parse_stat(self._read_text(f"{folder}/memory.stat") or "")
        files = self._files
        room = sum(stat.get(name, 0) for name in files.droppable) - sum(stat.get(name, 0) for name in files.held_up)
        return max(0, min(room, usage))

    def _hidden_limit(self) -> int | None:
        """v1 only: a limit above the topmost group that a container can see, which that group's statistics tell."""
        if self._files is not _V1 or not self._folders:
            return None
        return parse_stat(self._read_text(f"{self._folders[-1]}/memory.stat") or "").get("hierarchical_memory_limit")


def parse_own_groups(text: str) -> dict[int, str]:
    """/proc/self/cgroup: the path of the memory controller's v1 group and of the v2 group, by version."""
    found: dict[int, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if "memory" in controllers.split(","):
            found[1] = path
        elif number == "0" and not controllers:
            found[2] = path
    return found


def mount_lines(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """/proc/self/mountinfo (proc(5)): of each line the fields before " - ", unescaped, and those behind it."""
    for line in text.splitlines():
        mount, _, filesystem = line.partition(" - ")
        fields = [_OCTAL.sub(lambda octal: chr(int(octal[1], 8)), field) for field in mount.split(" ")]
        if len(fields) >= 5:
            yield fields, filesystem.split(" ")


def parse_mounts(text: str) -> dict[int, list[tuple[str, str]]]:
    """/proc/self/mountinfo: where the memory controller (v1) and the v2 tree are mounted, by version.

    Each as `(root, mount_point)`: the group that shows at the mount point, and the mount point.
    """
    found: dict[int, list[tuple[str, str]]] = {}
    for fields, kinds in mount_lines(text):
        if len(kinds) < 3:
            continue
        root, point = fields[3:5]
        if kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            found.setdefault(1, []).append((root, point))
        elif kinds[0] == "cgroup2":
            found.setdefault(2, []).append((root, point))
    return found


def parse_number(text: str) -> int | None:
    """A file of one number; None for "max" and for what is no number."""
    text = text.strip()
    return int(text) if _NUMBER.fullmatch(text) and len(text) < 20 else None


def parse_stat(text: str) -> dict[str, int]:
    """Lines of `name number`; others are passed over."""
    pairs = (line.split(" ") for line in text.splitlines())
    return {pair[0]: number for pair in pairs if len(pair) == 2 and (number := parse_number(pair[1])) is not None}


def parse_stalls(text: str) -> Stalls | None:
    """/proc/pressure/memory or a group's memory.pressure; None unless both lines are there."""
    percent = {name: float(number) for name, number in _STALL.findall(text)}
    if percent.keys() != {"some", "full"}:
        return None
    return Stalls(min(1.0, percent["some"] / 100), min(1.0, percent["full"] / 100))


def _folders(own: str, mounts: list[tuple[str, str]], is_folder: Callable[[str], bool]) -> list[str]:
    """The folders of the group `own` and of all above it that can be seen, upward; existing ones only.

    Where the group's own path is not under the mount's root (a container that was given its group as the root, but
    sees the outer path), the mount point itself is the group.
    """
    found: list[str] = []
    for root, point in mounts:
        inside = os.path.relpath(own, root)
        parts = [] if inside.startswith("..") or inside == "." else inside.split("/")
        candidates = ("/".join([point, *parts[:depth]]) for depth in range(len(parts), -1, -1))
        folders = [folder for folder in candidates if is_folder(folder)]
        found = max(found, folders, key=len)
    return found
