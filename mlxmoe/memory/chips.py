"""The memory bandwidth of Apple's chips: one table of published facts. Asks nothing of any machine."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip's bandwidth to unified memory, as Apple's technical specifications of the machines with it say.

    `name`: without "Apple". `least_bytes_per_s`, `most_bytes_per_s`: they differ where a chip is sold with fewer GPU
    cores on a narrower memory bus (the Max of M3, M4 and M5).
    """

    name: str
    least_bytes_per_s: int
    most_bytes_per_s: int


def _chip(name: str, least_gb: float, most_gb: float | None = None) -> Chip:
    return Chip(name, int(least_gb * GB), int((most_gb or least_gb) * GB))


# Source: Apple's published technical specifications of each Mac, "memory bandwidth", in GB/s. None measured by us.
CHIPS = {
    chip.name: chip
    for chip in (
        _chip("M1", 68.25), _chip("M1 Pro", 200), _chip("M1 Max", 400), _chip("M1 Ultra", 800),
        _chip("M2", 100), _chip("M2 Pro", 200), _chip("M2 Max", 400), _chip("M2 Ultra", 800),
        _chip("M3", 100), _chip("M3 Pro", 150), _chip("M3 Max", 300, 400), _chip("M3 Ultra", 819),
        _chip("M4", 120), _chip("M4 Pro", 273), _chip("M4 Max", 410, 546),
        _chip("M5", 153), _chip("M5 Pro", 307), _chip("M5 Max", 460, 614),
    )
}  # fmt: skip


def find_chip(brand: str) -> Chip | None:
    """The chip that the system calls `brand`, such as "Apple M4 Pro"; None for one that is not in the table."""
    return CHIPS.get(brand.strip().removeprefix("Apple "))
