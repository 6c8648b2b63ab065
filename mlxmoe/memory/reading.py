"""What the machine says about memory now, as one `Reading`, and what is to be made of it: usable bytes, pressure.

Which question goes to which part of the operating system is `sources`' business.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlxmoe.memory.cgroup import CgroupMemory, Stalls
from mlxmoe.memory.sources import MachineMemory, Sources

Pressure = Literal["normal", "warning", "critical"]

RESERVE_SHARE = 0.1  # of the memory: for the page cache that feeds misses, and for other programs
RESERVE_LEAST_BYTES = 2**30
# A control group holds no other programs, but a page cache with less than some 40 MB makes every read slow.
RESERVE_LEAST_IN_CGROUP_BYTES = 64 * 2**20

# Where the operating system gives no level (Linux), see `judge_pressure`.
HEADROOM_WARNING = 0.08  # below the plan's reserve of a tenth: a plan that is kept raises no alarm
HEADROOM_CRITICAL = 0.04
STALLS_WARNING = 0.20
STALLS_CRITICAL = 0.40
STALLS_HEADROOM = 0.25  # above it stalls are our own reading, not a lack of memory
SWAP_GROWTH_BYTES = 64 * 2**20
SWAP_WINDOW_S = 1.0

_LEVELS: dict[int, Pressure] = {1: "normal", 2: "warning", 4: "critical"}  # macOS' numbers


@dataclass(frozen=True, slots=True)
class Reading:
    """What the machine says now; in bytes, but for `stalls` and `pressure`.

    `total_bytes`: memory of the machine, or of the control group where that has less; 0 where it is not known.
    `available_bytes`: what can be had without swapping, within that limit. Misleads on macOS: it is inactive and free
    pages only, without what compressed pages and purgeable files could still give, yet with inactive pages that would
    have to be compressed; on Linux, file cache that is in constant use counts as available.
    `swap_used_bytes`: of the whole machine. Misleads: pages may lie there for days and harm nobody.
    `swap_change_bytes`: in the last second, or since this reader's last reading where that is longer ago; 0 at its
    first. What grows is what harms.
    `footprint_bytes`: what this process costs the machine: phys_footprint on macOS (Metal's memory too, which the
    resident size misses), anonymous memory in RAM and in swap on Linux; None where nothing tells. Misleads: memory
    that was freed but not yet returned to the system is in it.
    `active_bytes`: in MLX's arrays. Misleads: a lazy array has none until it is evaluated.
    `pool_bytes`: freed buffers that MLX keeps for reuse; they can be given back at once.
    `peak_bytes`: the most that was active since the process began, or since someone reset it.
    `working_set_bytes`: what the GPU recommends to keep at most (beyond it, Metal's allocations fail); None without
    a GPU. Misleads: it is fixed, whatever other programs hold.
    `limit_bytes`: the tightest control group's limit, None where none is below the machine's memory.
    `stalls`: Linux' pressure stall information, of this process's control group or of the machine, whichever is
    more; None elsewhere. Misleads: see `Stalls`.
    `pressure`: what the operating system says; see `judge_pressure`.
    """

    total_bytes: int
    available_bytes: int
    swap_used_bytes: int
    swap_change_bytes: int
    footprint_bytes: int | None
    active_bytes: int
    pool_bytes: int
    peak_bytes: int
    working_set_bytes: int | None
    limit_bytes: int | None
    stalls: Stalls | None
    pressure: Pressure

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class MemoryReader:
    """Takes readings, and remembers what the next is compared with.

    `sources`: whom to ask. `clock`: monotonic seconds.
    """

    def __init__(self, sources: Sources | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._sources = sources or Sources()
        self._working_set_bytes = self._sources.working_set_bytes()  # the same as long as the process lives
        self._clock = clock
        self._swap_used: deque[tuple[float, int]] = deque()  # when it was how much; compared with the oldest

    def read(self) -> Reading:
        """Ask now. Never raises: what cannot be told is None or 0."""
        sources = self._sources
        machine, cgroup, mlx = sources.machine(), sources.cgroup(), sources.mlx()
        total, available, limit = _within(machine, cgroup)
        last = self._swap_used[-1][1] if self._swap_used else 0
        swap_used = machine.swap_used_bytes if machine else last
        swap_change = self._swap_change(swap_used)
        stalls = _worse(sources.stalls(), cgroup.stalls if cgroup else None)
        return Reading(
            total_bytes=total,
            available_bytes=available,
            swap_used_bytes=swap_used,
            swap_change_bytes=swap_change,
            footprint_bytes=sources.footprint_bytes(),
            active_bytes=mlx.active_bytes,
            pool_bytes=mlx.pool_bytes,
            peak_bytes=mlx.peak_bytes,
            working_set_bytes=self._working_set_bytes,
            limit_bytes=limit,
            stalls=stalls,
            pressure=judge_pressure(
                level=sources.pressure_level(),
                stalls=stalls,
                available_bytes=available,
                total_bytes=total,
                swap_change_bytes=swap_change,
            ),
        )

    def _swap_change(self, used: int) -> int:
        """Since SWAP_WINDOW_S ago, or the last reading where that is longer ago."""
        now = self._clock()
        while len(self._swap_used) > 1 and now - self._swap_used[1][0] >= SWAP_WINDOW_S:
            self._swap_used.popleft()
        self._swap_used.append((now, used))
        return used - self._swap_used[0][1]


def judge_pressure(
    *,
    level: int | None,
    stalls: Stalls | None,
    available_bytes: int,
    total_bytes: int,
    swap_change_bytes: int,
) -> Pressure:
    """The pressure: macOS' own `level` (1, 2 or 4) where there is one, and then nothing else counts.

    Watermarks of free bytes misfire on macOS: with 82 % used, 8 GB compressed and swap in use it may rightly say
    normal. Elsewhere the worst of three signs:

    - Headroom. A control group's limit kills at once, long before ten-second averages move, so this one is early:
      available below 8 % of the total is a warning, below 4 % critical.
    - Stalls. `some` from 20 % on is a warning, `full` from 40 % on critical. Not lower: a healthy process that read
      random 2 MB pieces of a file of three times its page cache stalled for 11 % here (on a fast disk), and
      systemd-oomd starts to kill at 60 %. And only with less than a quarter available: with more, what waits is the
      reading of experts, and a smaller expert cache would read still more.
    - Swap that grew by 64 MiB within a second is a warning, and critical once headroom is short too: some
      cold pages always go there, so neither a little growth nor what has long been there counts.
    """
    if level in _LEVELS:
        return _LEVELS[level]
    headroom = available_bytes / total_bytes if total_bytes else 1.0
    swapping = swap_change_bytes >= SWAP_GROWTH_BYTES
    stalls = stalls if headroom < STALLS_HEADROOM else None
    short = headroom < HEADROOM_WARNING
    if headroom < HEADROOM_CRITICAL or (stalls and stalls.full >= STALLS_CRITICAL) or (swapping and short):
        return "critical"
    if short or swapping or (stalls and stalls.some >= STALLS_WARNING):
        return "warning"
    return "normal"


def usable_bytes(reading: Reading | None = None) -> int:
    """What an engine may take: what is available, less a reserve, within the GPU's working set. By default now.

    Misleads as `Reading.available_bytes` does.
    """
    reading = reading or MemoryReader().read()
    usable = reading.available_bytes - reserve_bytes(reading)
    if reading.working_set_bytes is not None:
        usable = min(usable, reading.working_set_bytes - reading.active_bytes)
    return max(0, usable)


def reserve_bytes(reading: Reading) -> int:
    """What is left to other programs, and to the page cache that feeds misses."""
    least = RESERVE_LEAST_BYTES if reading.limit_bytes is None else RESERVE_LEAST_IN_CGROUP_BYTES
    return max(least, int(reading.total_bytes * RESERVE_SHARE))


def working_set_bytes() -> int | None:
    """What the GPU recommends to keep at most; None where there is no GPU (beyond it, Metal fails allocations)."""
    return Sources().working_set_bytes()


def _within(machine: MachineMemory | None, cgroup: CgroupMemory | None) -> tuple[int, int, int | None]:
    """Total, available and limit bytes: the machine's, or the control group's where that has less."""
    if machine is None:
        return (cgroup.limit_bytes, cgroup.available_bytes, cgroup.limit_bytes) if cgroup else (0, 0, None)
    if cgroup is None:
        return machine.total_bytes, machine.available_bytes, None
    total = min(machine.total_bytes, cgroup.limit_bytes)
    available = min(machine.available_bytes, cgroup.available_bytes)
    return total, available, total if total < machine.total_bytes else None


def _worse(one: Stalls | None, other: Stalls | None) -> Stalls | None:
    if one is None or other is None:
        return one or other
    return Stalls(max(one.some, other.some), max(one.full, other.full))
