"""Asking the machine: one small method for each question, replaceable in tests. What cannot be told is None."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import mlx.core as mx
from packaging.requirements import InvalidRequirement, Requirement

from mlxmoe.doctor.disk import Disk, find_mount, linux_disk, mac_disk, parse_df
from mlxmoe.memory.macos import MacLibrary

COMMAND_TIMEOUT_S = 10  # a disk that is asleep takes a few seconds to answer
PACKAGES = ("mlxmoe", "mlx", "mlx-lm", "huggingface-hub")


class Machine:
    """The machine this runs on. `platform_name`: as `sys.platform`; `root`: where /proc and /sys are."""

    def __init__(self, platform_name: str = sys.platform, root: str = "/", mac: MacLibrary | None = None) -> None:
        self.platform = platform_name
        self._root = Path(root)
        self._mac = MacLibrary() if mac is None and platform_name == "darwin" else mac

    def system(self) -> str:
        """The operating system and its version."""
        if self.platform == "darwin":
            return f"macOS {platform.mac_ver()[0]}"
        return f"{platform.system()} {platform.release()}"

    def chip(self) -> str:
        """The processor's name, as the system calls it."""
        if self._mac is not None:
            return self._mac.text("machdep.cpu.brand_string") or platform.machine()
        for line in (self._read_text("/proc/cpuinfo") or "").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
        return platform.machine()

    def has_gpu(self) -> bool:
        """Whether MLX computes on a GPU here."""
        return bool(mx.default_device().type == mx.gpu)

    def wired_limit_bytes(self) -> int | None:
        """What somebody set as `iogpu.wired_limit_mb`; None where macOS' own default holds, and elsewhere."""
        megabytes = None if self._mac is None else self._mac.number("iogpu.wired_limit_mb")
        return megabytes * 2**20 if megabytes else None

    def open_files_limit(self) -> int:
        """How many files this process may have open."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def versions(self) -> dict[str, str]:
        """Of Python and of the packages that matter most."""
        found = {"python": platform.python_version()}
        for name in PACKAGES:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return found

    def unmet_requirements(self) -> tuple[str, ...]:
        """What of the declared requirements is not installed as declared, a sentence each."""
        try:
            lines = metadata.requires("mlxmoe") or []
        except metadata.PackageNotFoundError:
            return ()
        return unmet(lines, metadata.version)

    def free_bytes(self, folder: Path) -> int | None:
        """Free space of the disk that holds `folder`."""
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            return None

    def disk(self, path: Path) -> Disk:
        """The kind of disk that `path` lies on; links are followed."""
        real = os.path.realpath(path)
        if self.platform == "darwin":
            device = parse_df((self.run("df", "-P", real) or b"").decode("utf-8", "replace"))
            return mac_disk(device, self.run("diskutil", "info", "-plist", device) if device else None)
        mount = find_mount(self._read_text("/proc/self/mountinfo") or "", real)
        if mount is None:
            return Disk("unknown")
        folder = self._device_folder(self._device_number(mount.source) or mount.device)
        flags = [] if folder is None else [folder / "queue/rotational", folder.parent / "queue/rotational"]
        flag = next((path.read_text() for path in flags if path.is_file()), None)  # a partition has its disk's
        return linux_disk(mount.file_system, None if folder is None else str(folder), flag)

    def bytes_from_disk(self) -> int | None:
        """What this process has had read from disks so far; what came from the page cache is not in it."""
        if self._mac is not None:
            return None if (usage := self._mac.usage()) is None else int(usage.ri_diskio_bytesread)
        for line in (self._read_text("/proc/self/io") or "").splitlines():
            if line.startswith("read_bytes: ") and line[12:].isdecimal():
                return int(line[12:])
        return None

    def run(self, *command: str) -> bytes | None:
        """What a system tool prints; None where it fails."""
        try:
            done = subprocess.run(command, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout

    def _device_number(self, source: str) -> str | None:
        """`major:minor` of a device's path: some file systems (btrfs) show one of their own in mountinfo."""
        try:
            number = os.stat(source).st_rdev if source.startswith("/dev/") else 0
        except OSError:
            return None
        return f"{os.major(number)}:{os.minor(number)}" if number else None

    def _device_folder(self, number: str) -> Path | None:
        folder = self._root / "sys/dev/block" / number
        return Path(os.path.realpath(folder)) if folder.exists() else None

    def _read_text(self, path: str) -> str | None:
        try:
            return (self._root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None


def unmet(requirements: Sequence[str], version: Callable[[str], str]) -> tuple[str, ...]:
    """Which of `requirements` (PEP 508) the installed versions do not meet, a sentence each; extras are left out.

    `version`: of an installed package; raises PackageNotFoundError.
    """
    found = []
    for text in requirements:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(wanted.name)
        except metadata.PackageNotFoundError:
            found.append(f"{wanted.name} is not installed; {wanted.name}{wanted.specifier} is needed")
            continue
        if not wanted.specifier.contains(installed, prereleases=True):
            found.append(f"{wanted.name} {installed} is installed; {wanted.name}{wanted.specifier} is needed")
    return tuple(found)
