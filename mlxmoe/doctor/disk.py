"""What kind of disk a file lies on, out of what the system's tools and files say. Text in, facts out; asks nobody."""

from __future__ import annotations

import plistlib
import re
from dataclasses import dataclass
from typing import Literal
from xml.parsers.expat import ExpatError

from mlxmoe.memory.cgroup import mount_lines

Kind = Literal["ssd", "rotational", "network", "memory", "virtual", "unknown"]

# File systems of Linux whose files another machine serves, or that are in memory.
NETWORK_FILE_SYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "beegfs", "fuse.sshfs", "fuse.rclone",
    "fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse",
}  # fmt: skip
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}


@dataclass(frozen=True, slots=True)
class Disk:
    """`kind`: "virtual" is a virtual machine's, which does not tell what is below it.

    `external`: on USB or the like; None where nothing tells.
    """

    kind: Kind
    external: bool | None = None


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system of Linux. `device`: "major:minor". `source`: a device's path, or what the kind has."""

    point: str
    device: str
    file_system: str
    source: str


def find_mount(mountinfo: str, path: str) -> Mount | None:
    """The mount that holds the absolute, real `path`, by /proc/self/mountinfo (proc(5))."""
    found = None
    for fields, what in mount_lines(mountinfo):
        if len(what) < 2:
            continue
        point = fields[4]
        holds = path == point or path.startswith(point.rstrip("/") + "/")
        if holds and (found is None or len(point) >= len(found.point)):  # a later mount hides an earlier one
            found = Mount(point, fields[2], what[0], what[1])
    return found


def linux_disk(file_system: str, device_folder: str | None, rotational: str | None) -> Disk:
    """`device_folder`: the block device's real folder in /sys; `rotational`: its queue's flag, "0" or "1"."""
    if file_system in NETWORK_FILE_SYSTEMS:
        return Disk("network")
    if file_system in MEMORY_FILE_SYSTEMS:
        return Disk("memory", False)
    if device_folder is None:
        return Disk("unknown")
    external = "/usb" in device_folder
    if "/virtio" in device_folder or "/xen" in device_folder or "/vbd-" in device_folder:
        return Disk("virtual", external)  # its flag is the hypervisor's default, not a fact
    match (rotational or "").strip():
        case "0":
            return Disk("ssd", external)
        case "1" if not external:  # an enclosure's bridge often says so of an SSD
            return Disk("rotational", external)
    return Disk("unknown", external)


def parse_df(text: str) -> str | None:
    """The device or share of the one file system that `df -P PATH` shows."""
    match = re.search(r"^(.+?)\s+\d+\s+-?\d+\s+-?\d+\s+-?\d+%\s+/", text, re.MULTILINE)
    return match[1] if match else None


def mac_disk(device: str | None, info: bytes | None) -> Disk:
    """`device`: as `df` names it; `info`: what `diskutil info -plist` says of it."""
    if device is None:
        return Disk("unknown")
    if not device.startswith("/dev/"):
        return Disk("network") if device.startswith("//") or ":" in device else Disk("unknown")
    try:
        facts = plistlib.loads(info or b"")
    except (plistlib.InvalidFileException, ExpatError, ValueError, TypeError, AttributeError, OverflowError):
        return Disk("unknown")
    facts = facts if isinstance(facts, dict) else {}
    internal, solid = facts.get("Internal"), facts.get("SolidState")
    external = None if internal is None else not internal
    if solid:
        return Disk("ssd", external)
    # Disk images have no such entry, and an enclosure's bridge often denies what is an SSD.
    return Disk("rotational", external) if solid is False and internal else Disk("unknown", external)
