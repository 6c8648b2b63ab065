"""What the machine says about memory: every source with a stand-in, and this machine itself."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.memory import cgroup
from mlxmoe.memory.cgroup import CgroupMemory, MemoryCgroup, Stalls
from mlxmoe.memory.macos import MacLibrary, RusageInfoV2
from mlxmoe.memory.reading import MemoryReader, Pressure, Reading, judge_pressure, usable_bytes
from mlxmoe.memory.sources import MachineMemory, MlxMemory, Sources, parse_footprint, parse_meminfo

GIB, MIB = 2**30, 2**20


class Scripted(Sources):
    """A machine whose every answer is written down."""

    def __init__(self, **answers: Any) -> None:
        super().__init__("nowhere")
        self.answers: dict[str, Any] = {
            "machine": MachineMemory(32 * GIB, 20 * GIB, 0),
            "pressure_level": None,
            "footprint_bytes": None,
            "stalls": None,
            "cgroup": None,
            "mlx": MlxMemory(0, 0, 0),
            "working_set_bytes": None,
            **answers,
        }

    def machine(self) -> MachineMemory | None:
        return self.answers["machine"]

    def pressure_level(self) -> int | None:
        return self.answers["pressure_level"]

    def footprint_bytes(self) -> int | None:
        return self.answers["footprint_bytes"]

    def stalls(self) -> Stalls | None:
        return self.answers["stalls"]

    def cgroup(self) -> CgroupMemory | None:
        return self.answers["cgroup"]

    def mlx(self) -> MlxMemory:
        return self.answers["mlx"]

    def working_set_bytes(self) -> int | None:
        return self.answers["working_set_bytes"]


def read(**answers: Any) -> Reading:
    return MemoryReader(Scripted(**answers)).read()


# The reading


def test_a_reading_of_a_machine_that_tells_nothing() -> None:
    reading = read(machine=None)
    assert (reading.total_bytes, reading.available_bytes, reading.pressure) == (0, 0, "normal")
    assert reading.footprint_bytes is reading.limit_bytes is reading.stalls is reading.working_set_bytes is None
    assert usable_bytes(reading) == 0


def test_a_limit_below_the_machines_memory_is_the_memory() -> None:
    limited = read(cgroup=CgroupMemory(4 * GIB, 3 * GIB, None))
    assert (limited.total_bytes, limited.available_bytes, limited.limit_bytes) == (4 * GIB, 3 * GIB, 4 * GIB)
    above = read(cgroup=CgroupMemory(64 * GIB, 60 * GIB, None))
    assert (above.total_bytes, above.available_bytes, above.limit_bytes) == (32 * GIB, 20 * GIB, None)
    scarce = read(machine=MachineMemory(32 * GIB, 1 * GIB, 0), cgroup=CgroupMemory(4 * GIB, 3 * GIB, None))
    assert scarce.available_bytes == 1 * GIB, "a limit promises nothing that the machine does not have"
    alone = read(machine=None, cgroup=CgroupMemory(4 * GIB, 3 * GIB, None))
    assert (alone.total_bytes, alone.available_bytes, alone.limit_bytes) == (4 * GIB, 3 * GIB, 4 * GIB)


def test_swap_change_is_what_the_last_second_brought() -> None:
    sources, now = Scripted(), [50.0]
    reader = MemoryReader(sources, clock=lambda: now[0])
    changes = []
    for seconds, used in ((0, 5), (0.1, 6), (0.5, None), (0.3, 7), (0.2, 7), (5, 9), (0.1, 2)):
        now[0] += seconds
        sources.answers["machine"] = None if used is None else MachineMemory(32 * GIB, 20 * GIB, used * GIB)
        reading = reader.read()
        changes.append((reading.swap_used_bytes // GIB, reading.swap_change_bytes // GIB))
    assert changes == [(5, 0), (6, 1), (6, 1), (7, 2), (7, 1), (9, 2), (2, -5)]


def test_swapping_is_seen_at_any_rate_of_readings() -> None:
    sources, now = Scripted(), [0.0]
    reader = MemoryReader(sources, clock=lambda: now[0])
    used, seen = 0, []
    for _ in range(20):  # 100 MB a second, read ten times a second
        now[0] += 0.1
        used += 10**7
        sources.answers["machine"] = MachineMemory(32 * GIB, 20 * GIB, used)
        seen.append(reader.read().pressure)
    assert seen[0] == "normal"
    assert seen[-1] == "warning"


def test_the_worse_of_the_machines_and_the_groups_stalls_counts() -> None:
    group = CgroupMemory(4 * GIB, 3 * GIB, Stalls(0.5, 0.1))
    assert read(stalls=Stalls(0.1, 0.0), cgroup=group).stalls == Stalls(0.5, 0.1)
    assert read(stalls=None, cgroup=group).stalls == Stalls(0.5, 0.1)
    assert read(stalls=Stalls(0.1, 0.0)).stalls == Stalls(0.1, 0.0)


def test_a_reading_is_written_as_json() -> None:
    assert json.loads(json.dumps(read(stalls=Stalls(0.5, 0.1)).as_dict()))["stalls"] == {"some": 0.5, "full": 0.1}


# Pressure


@pytest.mark.parametrize(("level", "pressure"), [(1, "normal"), (2, "warning"), (4, "critical")])
def test_on_macos_the_systems_own_level_decides_alone(level: int, pressure: Pressure) -> None:
    for available in (0, 32 * GIB):
        for swap_change in (0, 8 * GIB):
            assert pressure == judge_pressure(
                level=level,
                stalls=None,
                available_bytes=available,
                total_bytes=32 * GIB,
                swap_change_bytes=swap_change,
            )


@pytest.mark.parametrize(
    ("available_percent", "stalls", "swap_change", "pressure"),
    [
        (50, None, 0, "normal"),
        (50, Stalls(0.11, 0.11), 0, "normal"),  # as measured of a process that streams through a small page cache
        (10, None, 0, "normal"),  # what a plan leaves
        (7, None, 0, "warning"),
        (3, None, 0, "critical"),
        (20, Stalls(0.2, 0.0), 0, "warning"),
        (20, Stalls(0.6, 0.4), 0, "critical"),
        (50, Stalls(0.6, 0.4), 0, "normal"),  # there is memory: it is our own reading that waits
        (50, None, 63 * MIB, "normal"),
        (50, None, 64 * MIB, "warning"),
        (7, None, 64 * MIB, "critical"),
        (50, None, -GIB, "normal"),
    ],
)
def test_without_a_level_the_worst_sign_counts(
    available_percent: int, stalls: Stalls | None, swap_change: int, pressure: Pressure
) -> None:
    for level in (None, 0, 3):
        assert pressure == judge_pressure(
            level=level,
            stalls=stalls,
            available_bytes=available_percent * GIB,
            total_bytes=100 * GIB,
            swap_change_bytes=swap_change,
        )


# What an engine may take


def test_usable_memory_leaves_a_reserve() -> None:
    assert usable_bytes(read()) == 20 * GIB - int(3.2 * GIB)
    assert usable_bytes(read(machine=MachineMemory(4 * GIB, 3 * GIB, 0))) == 2 * GIB, "at least 1 GiB for others"
    assert usable_bytes(read(machine=MachineMemory(32 * GIB, GIB // 2, 0))) == 0


def test_a_control_group_needs_less_reserve_than_a_machine() -> None:
    assert usable_bytes(read(cgroup=CgroupMemory(GIB, 900 * MIB, None))) == 900 * MIB - int(0.1 * GIB)
    assert usable_bytes(read(cgroup=CgroupMemory(200 * MIB, 100 * MIB, None))) == 36 * MIB


def test_the_gpus_working_set_bounds_what_is_usable() -> None:
    mlx = MlxMemory(active_bytes=2 * GIB, pool_bytes=0, peak_bytes=0)
    assert usable_bytes(read(working_set_bytes=12 * GIB, mlx=mlx)) == 10 * GIB
    assert usable_bytes(read(working_set_bytes=GIB, mlx=mlx)) == 0


# macOS, through a stand-in for its C library


class FakeLibc:
    """sysctlbyname and proc_pid_rusage as macOS answers them; `error`: what both return."""

    def __init__(self, level: int = 1, footprint: int = 0, disk_read: int = 0, error: int = 0) -> None:
        self.values = {
            b"kern.memorystatus_vm_pressure_level": level.to_bytes(4, "little"),
            b"hw.memsize": (32 * GIB).to_bytes(8, "little"),
            b"machdep.cpu.brand_string": b"Apple M4\0",
        }
        self.footprint, self.disk_read, self.error = footprint, disk_read, error

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: None, new_size: Any) -> int:
        assert (new, new_size.value) == (None, 0)
        if name not in self.values:
            return -1
        found = self.values[name]
        assert len(found) <= size._obj.value
        ctypes.memmove(value._obj, found, len(found))
        size._obj.value = len(found)
        return self.error

    def proc_pid_rusage(self, pid: int, flavor: int, buffer: Any) -> int:
        assert (pid, flavor) == (os.getpid(), 2)
        for offset, number in ((72, self.footprint), (144, self.disk_read)):
            ctypes.memmove(ctypes.addressof(buffer._obj) + offset, number.to_bytes(8, "little"), 8)
        return self.error


def test_macos_answers_through_its_c_library() -> None:
    sources = Sources("darwin", mac=MacLibrary(FakeLibc(level=2, footprint=3 * GIB)))
    assert (sources.pressure_level(), sources.footprint_bytes()) == (2, 3 * GIB)
    assert (sources.stalls(), sources.cgroup()) == (None, None)
    assert sources.machine() is not None
    assert MemoryReader(sources).read().pressure == "warning"


def test_kernel_values_are_of_three_kinds() -> None:
    mac = MacLibrary(FakeLibc(level=4, disk_read=7))
    assert mac.number("kern.memorystatus_vm_pressure_level") == 4
    assert mac.number("hw.memsize") == 32 * GIB
    assert mac.text("machdep.cpu.brand_string") == "Apple M4"
    assert (mac.number("no.such.value"), mac.text("no.such.value")) == (None, None)
    usage = mac.usage()
    assert usage is not None
    assert usage.ri_diskio_bytesread == 7


def test_what_macos_refuses_is_none() -> None:
    for library in (FakeLibc(error=-1), object()):
        sources = Sources("darwin", mac=MacLibrary(library))
        assert (sources.pressure_level(), sources.footprint_bytes()) == (None, None)


def test_the_struct_is_laid_out_as_the_header_says() -> None:
    assert ctypes.sizeof(RusageInfoV2) == 160
    assert RusageInfoV2.ri_phys_footprint.offset == 72
    assert RusageInfoV2.ri_diskio_bytesread.offset == 144


# Linux, through a tree of files


def tree(root: Path, files: Mapping[str, str | bytes]) -> Sources:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Sources("linux", root=str(root))


V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
NO_LIMIT_V1 = "9223372036854771712\n"


def v1(folder: str, limit: str | int, usage: int, stat: str = "") -> dict[str, str]:
    where = f"/sys/fs/cgroup/memory{folder}"
    return {
        f"{where}/memory.limit_in_bytes": f"{limit}\n",
        f"{where}/memory.usage_in_bytes": f"{usage}\n",
        f"{where}/memory.stat": stat,
    }


def v2(folder: str, maximum: str | int, usage: int, stat: str = "", high: str | int = "max") -> dict[str, str]:
    where = f"/sys/fs/cgroup{folder}"
    return {
        f"{where}/memory.max": f"{maximum}\n",
        f"{where}/memory.high": f"{high}\n",
        f"{where}/memory.current": f"{usage}\n",
        f"{where}/memory.stat": stat,
    }


def in_v1(path: str, root: str = "/") -> dict[str, str]:
    return {
        "/proc/self/cgroup": f"5:devices:/\n4:cpu,memory:{path}\n0::/elsewhere\n",
        "/proc/self/mountinfo": "22 27 0:21 / /proc rw - proc proc rw\n" + V1_MOUNT.format(root=root),
    }


def in_v2(path: str, root: str = "/") -> dict[str, str]:
    return {"/proc/self/cgroup": f"0::{path}\n", "/proc/self/mountinfo": V2_MOUNT.format(root=root)}


def test_v1_counts_file_cache_that_can_be_dropped_as_room(tmp_path: Path) -> None:
    stat = "inactive_file 7\ntotal_inactive_file 300\ntotal_active_file 200\ntotal_dirty 40\ntotal_writeback 10\n"
    sources = tree(tmp_path, in_v1("/a") | v1("/a", 1000, 900, stat))
    assert sources.cgroup() == CgroupMemory(1000, 1000 - 900 + 450, None)


def test_v1_without_a_limit_is_no_limit(tmp_path: Path) -> None:
    sources = tree(tmp_path, in_v1("/a") | v1("/a", NO_LIMIT_V1, 900) | v1("", NO_LIMIT_V1, 5000))
    assert sources.cgroup() is None


def test_v2_counts_max_and_high_slab_and_stalls(tmp_path: Path) -> None:
    stat = "anon 100\ninactive_file 300\nactive_file 200\nslab_reclaimable 20\nfile_dirty 40\nfile_writeback 10\n"
    files = in_v2("/a/b") | v2("/a/b", 1000, 900, stat, high=950) | v2("/a", "max", 900)
    pressure = "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=2.00 avg60=0.00 avg300=0.00 total=1\n"
    sources = tree(tmp_path, files | {"/sys/fs/cgroup/a/b/memory.pressure": pressure})
    assert sources.cgroup() == CgroupMemory(950, 950 - 900 + 470, Stalls(0.125, 0.02))


@pytest.mark.parametrize(("group", "inside"), [(v1, in_v1), (v2, in_v2)])
def test_the_tightest_limit_and_the_least_room_among_all_groups_above(
    tmp_path: Path, group: Any, inside: Any
) -> None:
    files = inside("/a/b/c") | group("/a/b/c", 5000, 10) | group("/a/b", 2000, 100) | group("/a", 9000, 8500)
    assert tree(tmp_path, files).cgroup() == CgroupMemory(2000, 500, None)


@pytest.mark.parametrize(("group", "inside"), [(v1, in_v1), (v2, in_v2)])
@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/docker/abc", "/docker/abc"),  # the host's path, and the group mounted as the root
        ("/", "/"),  # a namespace of its own
        ("/docker/abc", "/"),  # the host's path, which cannot be seen here
        ("/../../outside", "/"),
        ("/gone (deleted)", "/"),
    ],
)
def test_a_container_finds_its_group_at_the_mount(
    tmp_path: Path, group: Any, inside: Any, path: str, root: str
) -> None:
    assert tree(tmp_path, inside(path, root) | group("", 1000, 400)).cgroup() == CgroupMemory(1000, 600, None)


def test_v1_tells_of_a_limit_above_what_a_container_sees(tmp_path: Path) -> None:
    stat = "hierarchical_memory_limit 700\ntotal_inactive_file 0\n"
    sources = tree(tmp_path, in_v1("/pod/me", "/pod/me") | v1("", NO_LIMIT_V1, 400, stat))
    assert sources.cgroup() == CgroupMemory(700, 300, None)


def test_a_mount_point_with_a_space_is_found() -> None:
    line = r"35 31 0:32 / /sys/fs/my\040groups rw shared:1 - cgroup2 cgroup2 rw"
    assert cgroup.parse_mounts(line) == {2: [("/", "/sys/fs/my groups")]}


@pytest.mark.parametrize("junk", ["", "max\n", "-5\n", "1e9", "9" * 30, b"\xff\xfe", "²", "1 2", "\0"])
@pytest.mark.parametrize("name", ["max", "high", "current", "stat", "pressure"])
def test_a_malformed_file_counts_as_absent(tmp_path: Path, name: str, junk: str | bytes) -> None:
    files: dict[str, Any] = in_v2("/a") | v2("/a", 1000, 400, high=2000)
    found = tree(tmp_path, files | {f"/sys/fs/cgroup/a/memory.{name}": junk}).cgroup()
    expected = {"max": CgroupMemory(2000, 1600, None), "current": CgroupMemory(1000, 1000, None)}
    assert found == expected.get(name, CgroupMemory(1000, 600, None))


def test_a_linux_without_any_of_its_files_answers_with_none(tmp_path: Path) -> None:
    sources = Sources("linux", root=str(tmp_path))
    assert (sources.stalls(), sources.cgroup(), sources.footprint_bytes(), sources.pressure_level()) == (None,) * 4
    assert sources.machine() is not None, "psutil still knows"


def test_a_linux_tree_becomes_a_reading(tmp_path: Path) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 1000 kB\nMemFree: 5 kB\nMemAvailable:  600 kB\nSwapTotal: 9 kB\nSwapFree: 7 kB\n",
        "/proc/self/status": "Name:\tpython\nVmRSS:\t 99 kB\nRssAnon:\t  10 kB\nRssFile:\t 89 kB\nVmSwap:\t 3 kB\n",
        "/proc/pressure/memory": "some avg10=1.00 avg60=0.00 avg300=0.00 total=9\nfull avg10=0.50 avg60=0.00\n",
    }
    reading = MemoryReader(tree(tmp_path, files | in_v2("/a") | v2("/a", 800 * 1024, 300 * 1024))).read()
    assert (reading.total_bytes, reading.available_bytes) == (800 * 1024, 500 * 1024)
    assert (reading.swap_used_bytes, reading.footprint_bytes) == (2 * 1024, 13 * 1024)
    assert (reading.stalls, reading.pressure) == (Stalls(0.01, 0.005), "normal")


# Parsers never raise

LINES = st.sampled_from(
    [
        "some avg10=1.00 avg60", "full avg10=999.99", "full avg10=x",
        "MemTotal: 1 kB", "MemTotal: ² kB", "RssAnon: 1 kB", "a 1", "a  1", "total_dirty 99999999999999999999999",
        "0::/a", "4:memory:/a/../..", "4:memory", "::", " - ",
        "1 2 3 / /m rw - cgroup2 x rw", "1 2 3 / /m - cgroup c memory", r"1 2 3 \777 \04 rw - cgroup c memory",
    ]
)  # fmt: skip


@given(text=st.one_of(st.text(), st.lists(LINES).map("\n".join)))
def test_no_text_makes_a_parser_raise(text: str) -> None:
    parse_meminfo(text)
    parse_footprint(text)
    for parse in (cgroup.parse_own_groups, cgroup.parse_mounts, cgroup.parse_number, cgroup.parse_stat):
        parse(text)
    stalls = cgroup.parse_stalls(text)
    assert stalls is None or (0 <= stalls.some <= 1 and 0 <= stalls.full <= 1)


@given(own=st.lists(LINES), mounts=st.lists(LINES), text=st.one_of(st.none(), st.text(), st.integers().map(str)))
def test_no_tree_makes_the_cgroup_raise(own: list[str], mounts: list[str], text: str | None) -> None:
    files = {"/proc/self/cgroup": "\n".join(own), "/proc/self/mountinfo": "\n".join(mounts)}
    found = MemoryCgroup(lambda path: files.get(path, text), lambda path: True).read()
    assert found is None or 0 <= found.available_bytes <= found.limit_bytes


SIZES = st.integers(0, 10**6)


@given(limits=st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=4))
def test_room_is_never_negative_and_never_above_a_limit(limits: list[tuple[int, int, int]]) -> None:
    files = {"/proc/self/cgroup": "0::/a/a/a\n", "/proc/self/mountinfo": "1 2 3 / /m rw - cgroup2 x rw\n"}
    for depth, (limit, usage, cache) in enumerate(limits):
        where = "/m" + "/a" * depth
        files |= {f"{where}/memory.max": str(limit), f"{where}/memory.current": str(usage)}
        files[f"{where}/memory.stat"] = f"inactive_file {cache}\n"
    found = MemoryCgroup(files.get, lambda path: True).read()
    assert found is not None
    assert found.limit_bytes == min(limit for limit, _, _ in limits)
    assert 0 <= found.available_bytes <= found.limit_bytes


# This machine


def test_this_machine_is_read() -> None:
    reading = MemoryReader().read()
    assert 0 < reading.available_bytes <= reading.total_bytes <= psutil.virtual_memory().total
    assert reading.footprint_bytes is not None
    assert 0 < reading.footprint_bytes <= 2 * psutil.Process().memory_info().rss
    assert reading.pressure in ("normal", "warning", "critical")


def test_a_footprint_grows_with_what_mlx_holds() -> None:
    import mlx.core as mx

    reader = MemoryReader()
    before = reader.read()
    held = mx.ones((64 * MIB,), dtype=mx.uint8)
    mx.eval(held)
    after = reader.read()
    assert after.active_bytes - before.active_bytes == held.nbytes
    assert before.footprint_bytes is not None
    assert after.footprint_bytes is not None
    assert after.footprint_bytes - before.footprint_bytes > 60 * MIB
    assert after.peak_bytes >= after.active_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="the figure is for Linux")
def test_a_reading_is_cheap() -> None:
    reader = MemoryReader()
    reader.read()

    def once() -> float:
        start = time.perf_counter()
        reader.read()
        return time.perf_counter() - start

    best = min(once() for _ in range(200))
    assert best < 0.001, f"a reading took {best * 1e6:.0f} us at best; the guard takes one every few tokens"


CHILD = """
import json, os
open(os.environ["GROUP"] + "/cgroup.procs", "w").write(str(os.getpid()))
import mlx.core as mx
from mlxmoe.memory.macos import MacLibrary, RusageInfoV2
from mlxmoe.memory.reading import MemoryReader, usable_bytes
reader = MemoryReader()
readings = [reader.read()]
held = mx.ones((96 * 2**20,), dtype=mx.uint8); mx.eval(held)
readings.append(reader.read())
with open(os.environ["SCRATCH"], "wb") as file:  # 64 MB of page cache, written out: it can be dropped
    file.write(bytes(64 * 2**20)); file.flush(); os.fsync(file.fileno())
readings.append(reader.read())
more = mx.ones((readings[-1].available_bytes - int(0.06 * readings[-1].total_bytes),), dtype=mx.uint8); mx.eval(more)
readings.append(reader.read())
print(json.dumps([{**reading.as_dict(), "usable": usable_bytes(reading)} for reading in readings]))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group for memory that a test may put a limit on."""
    for top, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(top) / f"mlxmoe-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / limit).exists():
            break
        folder.rmdir()
    else:
        pytest.skip(
            "no control group for memory can be made here: it takes Linux, root and a writable /sys/fs/cgroup"
        )
    yield folder
    for _ in range(50):  # the kernel needs a moment after the last process has gone
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def test_a_real_limit_is_told_truly(group: Path, tmp_path: Path) -> None:
    limit = 512 * MIB
    for name in ("memory.limit_in_bytes", "memory.max"):
        if (group / name).exists():
            (group / name).write_text(str(limit))
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120,
        env={**os.environ, "GROUP": str(group), "SCRATCH": str(tmp_path / "scratch")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, holding, cached, full = json.loads(done.stdout)
    for reading in (first, holding, cached, full):
        assert reading["limit_bytes"] == reading["total_bytes"] == limit
        assert reading["usable"] == max(0, reading["available_bytes"] - 64 * MIB)
    assert 256 * MIB < first["available_bytes"] < limit
    taken = first["available_bytes"] - holding["available_bytes"]
    assert 90 * MIB < taken < 104 * MIB, "what is held is not available; the kernel counts in batches"
    assert abs(cached["available_bytes"] - holding["available_bytes"]) < 16 * MIB, "clean page cache is available"
    assert first["pressure"] == cached["pressure"] == "normal"
    assert full["pressure"] == "warning", "six percent are left"
