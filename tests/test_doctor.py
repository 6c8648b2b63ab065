"""What doctor finds wrong, from facts that are written down; and this machine as it is."""

from __future__ import annotations

import json
import os
import plistlib
import sys
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import Result
from conftest import command
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.doctor import Facts, Finding, Report, checks, disk, examine
from mlxmoe.doctor.checks import judge
from mlxmoe.doctor.disk import Disk, Kind
from mlxmoe.doctor.facts import ModelFacts, gather
from mlxmoe.doctor.machine import Machine, unmet
from mlxmoe.doctor.read_rate import ReadRate, expert_pieces, measure_read_rate
from mlxmoe.errors import ModelNotFoundError
from mlxmoe.experts.safetensors import read_checkpoint
from mlxmoe.hub import demo_folder, resolve
from mlxmoe.memory.chips import CHIPS, find_chip
from mlxmoe.memory.reading import MemoryReader, Reading

GIB = 2**30

HEALTHY_READING = Reading(
    total_bytes=32 * GIB,
    available_bytes=20 * GIB,
    swap_used_bytes=GIB,
    swap_change_bytes=0,
    footprint_bytes=GIB // 10,
    active_bytes=0,
    pool_bytes=0,
    peak_bytes=0,
    working_set_bytes=24 * GIB,
    limit_bytes=None,
    stalls=None,
    pressure="normal",
)
MAC_MINI = Facts(
    platform="darwin",
    system="macOS 15.3",
    chip="Apple M4",
    bandwidth=CHIPS["M4"],
    gpu=True,
    reading=HEALTHY_READING,
    usable_bytes=17 * GIB,
    wired_limit_bytes=None,
    open_files=2048,
    versions={"python": "3.12.1"},
    unmet=(),
    cache_folder="/Users/me/.cache/huggingface/hub",
    cache_disk=Disk("ssd", False),
    cache_free_bytes=200 * GIB,
    model=None,
)
COLD = ReadRate(bytes_read=6 * GIB, seconds=2.0, piece_bytes=2**20, disk_share=1.0)
SMALL = ModelFacts("/models/small", 4 * GIB, 1, Disk("ssd", False), COLD, None)
LARGE = replace(SMALL, path="/models/large", nbytes=60 * GIB, files=13)


def found(facts: Facts) -> list[Finding]:
    return list(judge(facts))


def the_one(facts: Facts, level: str = "wrong") -> Finding:
    """The only finding, with all that a finding must say."""
    (finding,) = judge(facts)
    assert finding.level == level
    assert finding.what
    assert finding.why
    assert finding.what_to_do
    return finding


# Findings


def test_a_healthy_mac_has_none() -> None:
    for model in (None, SMALL, LARGE):
        assert found(replace(MAC_MINI, model=model)) == []
        assert Report(replace(MAC_MINI, model=model), ()).healthy


def test_swap_in_use_is_nothing_wrong_while_pressure_is_normal() -> None:
    assert found(replace(MAC_MINI, reading=replace(HEALTHY_READING, swap_used_bytes=8 * GIB))) == []


@pytest.mark.parametrize("pressure", ["warning", "critical"])
def test_pressure_is_wrong_and_swap_is_named_with_it(pressure: Any) -> None:
    finding = the_one(replace(MAC_MINI, reading=replace(HEALTHY_READING, pressure=pressure)))
    assert pressure in finding.what
    assert "1.1 GB are in swap" in finding.what
    dry = the_one(replace(MAC_MINI, reading=replace(HEALTHY_READING, pressure=pressure, swap_used_bytes=0)))
    assert "swap" not in dry.what


def test_packages_out_of_range_are_wrong() -> None:
    sentence = "mlx-lm 0.31.0 is installed; mlx-lm<0.33,>=0.32.2 is needed"
    assert the_one(replace(MAC_MINI, unmet=(sentence,))).what == sentence + "."


def test_a_mac_without_metal_is_wrong_and_a_linux_without_gpu_is_not() -> None:
    assert "Metal" in the_one(replace(MAC_MINI, gpu=False)).why
    assert "slow" in the_one(replace(MAC_MINI, gpu=False, platform="linux"), "note").why


def test_little_memory_is_wrong_and_a_limit_is_worth_knowing() -> None:
    small = replace(HEALTHY_READING, total_bytes=7 * 10**9)
    assert "7.0 GB" in the_one(replace(MAC_MINI, reading=small)).what
    eight = replace(HEALTHY_READING, total_bytes=8 * GIB)
    assert found(replace(MAC_MINI, reading=eight)) == []
    limited = replace(HEALTHY_READING, limit_bytes=16 * GIB, total_bytes=16 * GIB)
    assert "17.2 GB" in the_one(replace(MAC_MINI, reading=limited), "note").what
    tight = replace(limited, limit_bytes=GIB, total_bytes=GIB)
    assert "1.1 GB" in the_one(replace(MAC_MINI, reading=tight), "note").what, "chosen, so not wrong"
    assert found(replace(MAC_MINI, reading=replace(small, total_bytes=0))) == [], "what is not known is not wrong"


def test_a_wired_limit_that_somebody_set_is_wrong_at_either_end() -> None:
    high = the_one(replace(MAC_MINI, wired_limit_bytes=30 * GIB))
    assert "panics" in high.why
    low = the_one(replace(MAC_MINI, wired_limit_bytes=8 * GIB))
    assert "fewer experts" in low.why
    assert high.what_to_do == low.what_to_do
    for moderate in (16 * GIB, 24 * GIB, 28 * GIB):
        assert found(replace(MAC_MINI, wired_limit_bytes=moderate)) == []


def test_too_few_open_files_for_the_model_are_wrong() -> None:
    many = replace(LARGE, files=1000)
    assert "2064 are needed" in the_one(replace(MAC_MINI, model=many)).what
    assert found(replace(MAC_MINI, model=many, open_files=-1)) == [], "-1 is no limit"


def test_a_full_disk_is_wrong() -> None:
    assert "HF_HOME" in the_one(replace(MAC_MINI, cache_free_bytes=GIB)).what_to_do
    assert found(replace(MAC_MINI, cache_free_bytes=None)) == []


@pytest.mark.parametrize("kind", ["network", "rotational"])
def test_a_slow_kind_of_disk_is_wrong_where_experts_stream_from_it(kind: Kind) -> None:
    streaming = the_one(replace(MAC_MINI, model=replace(LARGE, disk=Disk(kind))))
    assert "/models/large" in streaming.what
    fitting = the_one(replace(MAC_MINI, model=replace(SMALL, disk=Disk(kind))), "note")
    assert "only loading is slow" in fitting.why


def test_a_slow_disk_is_wrong_only_if_it_is_known_to_be_the_disk() -> None:
    slow = replace(COLD, bytes_read=10**9)
    outside = replace(LARGE, rate=slow, disk=Disk("ssd", True))
    finding = the_one(replace(MAC_MINI, model=outside))
    assert "500.0 MB/s from an external disk" in finding.what
    assert "takes 2.0 s" in finding.why
    assert the_one(replace(MAC_MINI, model=replace(SMALL, rate=slow)), "note")
    for share in (None, 0.5):
        assert found(replace(MAC_MINI, model=replace(LARGE, rate=replace(slow, disk_share=share)))) == []
    assert found(replace(MAC_MINI, model=replace(LARGE, rate=None))) == []


def test_a_damaged_model_is_wrong() -> None:
    damaged = replace(SMALL, nbytes=0, files=0, rate=None, problem="model.safetensors is truncated.")
    assert the_one(replace(MAC_MINI, model=damaged)).what == "model.safetensors is truncated."


def test_what_is_wrong_comes_before_what_is_worth_knowing() -> None:
    facts = replace(MAC_MINI, platform="linux", gpu=False, cache_free_bytes=0)
    assert [finding.level for finding in judge(facts)] == ["wrong", "note"]
    assert not Report(facts, judge(facts)).healthy
    assert Report(facts, judge(facts)[1:]).healthy


def test_no_advice_without_a_reason_is_given() -> None:
    source = Path(checks.__file__).read_text(encoding="utf-8").split('"""', 2)[2]
    for word in ("scheduler", "purge", "vm_compressor", "swapoff", "nvram", "wired_lwm", "gpu clock"):
        assert word not in source.lower()


# Chips


@pytest.mark.parametrize(
    ("brand", "gigabytes"), [("Apple M1", 68.25), ("Apple M4 Pro", 273), ("Apple M3 Ultra", 819), ("Apple M5", 153)]
)
def test_the_bandwidth_of_apples_chips_is_known(brand: str, gigabytes: float) -> None:
    chip = find_chip(brand)
    assert chip is not None
    assert chip.least_bytes_per_s == gigabytes * 10**9


def test_an_unknown_chip_has_no_bandwidth() -> None:
    for brand in ("Apple M99", "Apple M4 Extreme", "Apple M1 (Virtual)", "AMD EPYC", "", "Intel(R) Core(TM) i7 M4"):
        assert find_chip(brand) is None
    assert all(chip.least_bytes_per_s <= chip.most_bytes_per_s for chip in CHIPS.values())


# Disks

MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:26 / /tmp rw - tmpfs tmpfs rw
31 27 8:1 / /mnt/my\\040disk rw shared:1 - ext4 /dev/sda1 rw
32 27 0:50 / /mnt/share rw - nfs4 server:/models rw
33 27 0:51 / /mnt/share rw - cifs //server/models rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "file_system"),
    [
        ("/home/me", "ext4"),
        ("/tmp/x", "tmpfs"),
        ("/tmpx", "ext4"),
        ("/mnt/my disk/a", "ext4"),
        ("/mnt/share", "cifs"),
    ],
)
def test_the_mount_is_the_deepest_and_latest_that_holds_the_path(path: str, file_system: str) -> None:
    mount = disk.find_mount(MOUNTS, path)
    assert mount is not None
    assert mount.file_system == file_system


@pytest.mark.parametrize(
    ("file_system", "folder", "flag", "expected"),
    [
        ("ext4", "/sys/devices/pci0000:00/nvme/nvme0/nvme0n1/nvme0n1p2", "0\n", Disk("ssd", False)),
        ("ext4", "/sys/devices/pci0000:00/ata1/host0/block/sda/sda1", "1\n", Disk("rotational", False)),
        ("ext4", "/sys/devices/pci0000:00/usb2/2-1/host6/block/sdb/sdb1", "0\n", Disk("ssd", True)),
        ("ext4", "/sys/devices/pci0000:00/usb2/2-1/host6/block/sdb/sdb1", "1\n", Disk("unknown", True)),
        ("ext4", "/sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda", "1\n", Disk("virtual", False)),
        ("ext4", "/sys/devices/x/sda", None, Disk("unknown", False)),
        ("nfs4", None, None, Disk("network")),
        ("tmpfs", None, None, Disk("memory", False)),
        ("overlay", None, None, Disk("unknown")),
    ],
)
def test_a_disk_of_linux(file_system: str, folder: str | None, flag: str | None, expected: Disk) -> None:
    assert disk.linux_disk(file_system, folder, flag) == expected


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"SolidState": True, "Internal": True}, Disk("ssd", False)),
        ({"SolidState": True, "Internal": False}, Disk("ssd", True)),
        ({"SolidState": False, "Internal": True}, Disk("rotational", False)),
        ({"SolidState": False, "Internal": False}, Disk("unknown", True)),
        ({"Internal": False}, Disk("unknown", True)),
        ({"Error": True}, Disk("unknown")),
        (["no", "dict"], Disk("unknown")),
    ],
)
def test_a_disk_of_macos(info: Any, expected: Disk) -> None:
    assert disk.mac_disk("/dev/disk3s5", plistlib.dumps(info)) == expected


def test_shares_of_macos_and_what_diskutil_does_not_tell() -> None:
    assert disk.mac_disk("//me@server/models", None) == Disk("network")
    assert disk.mac_disk("server:/models", None) == Disk("network")
    for device in (None, "map auto_home", "/dev/disk9"):
        assert disk.mac_disk(device, None) == Disk("unknown")


def test_the_device_is_read_off_df() -> None:
    head = "Filesystem   512-blocks      Used Available Capacity  Mounted on\n"
    assert disk.parse_df(f"{head}/dev/disk3s5 1942700360 900 -1042 47% /System/Volumes/Data\n") == "/dev/disk3s5"
    assert disk.parse_df(f"{head}//me@my server/models 10 9 1 90% /Volumes/models\n") == "//me@my server/models"
    assert disk.parse_df("df: x: No such file or directory\n") is None


@given(text=st.text(), raw=st.binary())
def test_no_output_of_a_tool_makes_a_parser_raise(text: str, raw: bytes) -> None:
    disk.find_mount(text, "/a")
    disk.parse_df(text)
    assert disk.mac_disk("/dev/disk1", raw).kind in ("unknown", "ssd", "rotational")
    assert disk.mac_disk("/dev/disk1", b"<?xml version='1.0'?><plist><dict>" + raw).kind in ("unknown", "ssd")


# The machine


class Mac(Machine):
    """A Mac whose tools print what is written down."""

    def __init__(self, outputs: dict[str, bytes]) -> None:
        super().__init__("darwin", mac=FakeKernel())  # type: ignore[arg-type]
        self.outputs = outputs

    def run(self, *command: str) -> bytes | None:
        return self.outputs.get(command[0])


class FakeKernel:
    def number(self, name: str) -> int | None:
        return {"iogpu.wired_limit_mb": 28672}.get(name)

    def text(self, name: str) -> str | None:
        return {"machdep.cpu.brand_string": "Apple M4 Pro"}.get(name)

    def usage(self) -> None:
        return None


def test_a_mac_is_asked_through_its_kernel_and_its_tools() -> None:
    df = b"Filesystem 512-blocks Used Available Capacity Mounted on\n/dev/disk3s5 9 9 0 100% /System/Volumes/Data\n"
    mac = Mac({"df": df, "diskutil": plistlib.dumps({"SolidState": True, "Internal": True})})
    assert (mac.chip(), mac.wired_limit_bytes(), mac.bytes_from_disk()) == ("Apple M4 Pro", 28 * GIB, None)
    assert mac.disk(Path("/Users/me")) == Disk("ssd", False)
    assert Mac({}).disk(Path("/Users/me")) == Disk("unknown")
    assert mac.system().startswith("macOS")


def test_a_linux_is_asked_through_its_files(tmp_path: Path) -> None:
    here = os.path.realpath(tmp_path)
    device = tmp_path / "sys/devices/nvme/nvme0n1"
    (device / "queue").mkdir(parents=True)
    (device / "queue/rotational").write_text("0\n")
    (device / "nvme0n1p2").mkdir()
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    (tmp_path / "sys/dev/block/259:2").symlink_to(device / "nvme0n1p2")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(f"27 1 259:2 / {here} rw - ext4 /dev/no-such-device rw\n")
    (tmp_path / "proc/self/io").write_text("rchar: 9\nread_bytes: 4096\n")
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast One\n")
    linux = Machine("linux", root=here)
    assert (linux.chip(), linux.bytes_from_disk(), linux.wired_limit_bytes()) == ("Fast One", 4096, None)
    assert linux.disk(tmp_path) == Disk("ssd", False), "a partition's disk has the flag"


def test_a_machine_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    silent = Machine("linux", root=str(tmp_path))
    assert silent.chip()
    assert (silent.bytes_from_disk(), silent.disk(tmp_path)) == (None, Disk("unknown"))
    assert silent.free_bytes(tmp_path / "nowhere") is None
    assert silent.run("no-such-tool-anywhere") is None
    assert silent.run("false") is None


def test_requirements_that_are_not_met_are_named() -> None:
    installed = {"mlx-lm": "0.31.0", "psutil": "7.0", "mlx": "0.33.0.dev1"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    lines = [
        "mlx-lm<0.33,>=0.32.2", "psutil>=6.0", "rich>=13.7", "mlx[cpu]>=0.32.2; sys_platform != 'nowhere'",
        "other>=1; sys_platform == 'nowhere'", "pytest>=8; extra == 'dev'", "!malformed",
    ]  # fmt: skip
    assert unmet(lines, version) == (
        "mlx-lm 0.31.0 is installed; mlx-lm<0.33,>=0.32.2 is needed",
        "rich is not installed; rich>=13.7 is needed",
    )


# Reading rate


@pytest.fixture(scope="module")
def hundred_megabytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two stacked expert tensors of 8 experts with 6 MB each, and a trunk."""
    folder = tmp_path_factory.mktemp("rate")
    names = ("layers.0.mlp.switch_mlp.up_proj", "layers.1.mlp.switch_mlp.up_proj")
    arrays = {f"{name}.weight": mx.random.normal((8, 1500, 1000)) for name in names}
    arrays |= {f"{name}.scales": mx.ones((8, 1500, 10)) for name in names}
    mx.save_safetensors(str(folder / "model.safetensors"), {**arrays, "embed.weight": mx.ones((1000, 100))})
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    return folder


def test_pieces_are_the_experts_and_each_lies_in_its_file_once(hundred_megabytes: Path) -> None:
    checkpoint = read_checkpoint(hundred_megabytes)
    pieces = sorted(expert_pieces(checkpoint))
    assert {size for _, _, size in pieces} == {4 * 2**20, 6_000_000 - 4 * 2**20}, "as the reader cuts an expert"
    assert sum(size for _, _, size in pieces) == 2 * 8 * 6_000_000, "no scales, no trunk"
    assert all(one[1] + one[2] <= other[1] for one, other in pairwise(pieces))


def test_one_tensor_an_expert_is_known_by_its_name(tmp_path: Path) -> None:
    arrays = {f"layers.0.mlp.experts.{number}.up_proj.weight": mx.ones((10, 10)) for number in range(3)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {**arrays, "embed.weight": mx.ones((1000, 100))})
    assert {size for _, _, size in expert_pieces(read_checkpoint(tmp_path))} == {400}


def test_the_rate_says_how_much_came_from_the_disk(hundred_megabytes: Path) -> None:
    machine = Machine()
    rate = measure_read_rate(read_checkpoint(hundred_megabytes), machine.bytes_from_disk)
    assert rate is not None
    assert 0 < rate.bytes_read <= 2 * 8 * 6_000_000
    assert rate.bytes_per_s > 10**6
    assert rate.disk_share is None or 0 <= rate.disk_share <= 1
    if sys.platform == "linux" and machine.disk(hundred_megabytes).kind in ("ssd", "virtual", "rotational"):
        assert rate.cold, "dropped from the page cache first"


def test_the_measurement_ends_in_time_and_does_not_claim_what_is_not_told(hundred_megabytes: Path) -> None:
    rate = measure_read_rate(read_checkpoint(hundred_megabytes), lambda: None, seconds=0.001)
    assert rate is not None
    assert rate.seconds < 1
    assert (rate.disk_share, rate.cold) == (None, False)


def test_a_small_model_is_not_measured(tiny: Path) -> None:
    assert measure_read_rate(read_checkpoint(tiny), lambda: 0) is None


# The whole


def test_facts_of_this_machine_are_gathered(hundred_megabytes: Path) -> None:
    facts = gather(Machine(), MemoryReader(), hundred_megabytes)
    assert facts.reading.total_bytes > 0
    assert facts.versions["mlx-lm"] == metadata.version("mlx-lm")
    assert facts.unmet == ()
    assert facts.model is not None
    assert (facts.model.files, facts.model.problem) == (1, None)
    assert facts.model.rate is not None


def test_a_truncated_model_is_a_finding_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x09\0\0\0\0\0\0\0{}")
    report = examine(tmp_path)
    assert not report.healthy
    assert any("no whole safetensors file" in finding.what for finding in report.findings)


def test_a_folder_that_is_no_model_is_a_finding(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.ones((10, 10))})
    assert any("no config.json" in finding.what for finding in examine(tmp_path).findings)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    assert any("not readable JSON" in finding.what for finding in examine(tmp_path).findings)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {})
    assert any("hold no tensor" in finding.what for finding in examine(tmp_path).findings)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    assert any("is not a file" in finding.what for finding in examine(tmp_path).findings)


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    for model in ("org/never-downloaded", "org/never..downloaded"):
        with pytest.raises(ModelNotFoundError, match="not downloaded to this machine"):
            examine(model)
    assert resolve(None, download=False) == demo_folder()


def doctor(*arguments: str | Path) -> Result:
    return command("doctor", *arguments, COLUMNS="300")


def test_the_command_prints_a_table_and_ends_as_it_found(hundred_megabytes: Path) -> None:
    done = doctor(hundred_megabytes)
    assert done.exit_code == (0 if "Nothing is wrong." in done.stdout else 1), done.stderr
    for word in ("memory", "pressure", "swap used", "versions", "reading it", "MB in 1 file, fits in memory"):
        assert word in done.stdout
    assert "Traceback" not in done.stderr


def test_the_commands_json_is_the_report() -> None:
    done = doctor("--json")
    report = json.loads(done.stdout)
    assert done.exit_code == (0 if report["healthy"] else 1)
    assert report["facts"]["reading"]["total_bytes"] > 0
    assert report["facts"]["model"] is None


def test_the_command_ends_with_1_when_something_is_wrong(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert done.exit_code == 1
    assert "Wrong: " in done.stdout
    assert "What to do: " in done.stdout
    missing = doctor("/nowhere/at/all")
    assert (missing.exit_code, missing.stdout) == (3, "")
