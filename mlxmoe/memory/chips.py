"""Apple's chips: one table of published facts about their speed. Asks nothing of any machine."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip's speeds, as published. None of them was measured by us.

    `name`: without "Apple". `least_bytes_per_s`, `most_bytes_per_s`: bandwidth to unified memory; they differ where a
    chip is sold with fewer GPU cores on a narrower memory bus (the Max of M3, M4 and M5). `flops_per_s`: what its
    largest GPU computes in float32, None where nothing is published. `ssd_bytes_per_s`: what large reads from the SSD
    of a machine with it were reported to reach, None where no report is known: it depends on the SSD's size, too.
    """

    name: str
    least_bytes_per_s: int
    most_bytes_per_s: int
    flops_per_s: float | None = None
    ssd_bytes_per_s: int | None = None


def _chip(
    name: str,
    least_gb: float,
    most_gb: float | None = None,
    *,
    tflops: float | None = None,
    ssd_gb: float | None = None,
) -> Chip:
    return Chip(
        name,
        int(least_gb * GB),
        int((most_gb or least_gb) * GB),
        None if tflops is None else tflops * 10**12,
        None if ssd_gb is None else int(ssd_gb * GB),
    )


# Sources, bandwidth: Apple's technical specifications of each Mac, "memory bandwidth", in GB/s.
# TFLOPS: Apple's announcements of M1 and M2; for M3 and M4 the hardware table of huggingface.js (its pull request
# 1044 for M4). M5 has units for matrices: these are what a published prompt rate comes to (M5 Max, Qwen3.5-35B-A3B in
# 4 bits, 2757 tokens/s: issue 24 of magicnight/Mac-MLX) with PREFILL_EFFICIENCY of `tuning.roofline`, by GPU cores.
# SSD: of a Mac mini M4 with 32 GB, from the same report as its decode rates in tests/model_facts.py.
CHIPS = {
    chip.name: chip
    for chip in (
        _chip("M1", 68.25, tflops=2.6), _chip("M1 Pro", 200, tflops=5.2), _chip("M1 Max", 400, tflops=10.4),
        _chip("M1 Ultra", 800, tflops=21),
        _chip("M2", 100, tflops=3.6), _chip("M2 Pro", 200, tflops=6.8), _chip("M2 Max", 400, tflops=13.6),
        _chip("M2 Ultra", 800, tflops=27.2),
        _chip("M3", 100, tflops=4.1), _chip("M3 Pro", 150, tflops=7.4), _chip("M3 Max", 300, 400, tflops=14.2),
        _chip("M3 Ultra", 819, tflops=28.4),
        _chip("M4", 120, tflops=4.6, ssd_gb=2.4), _chip("M4 Pro", 273, tflops=9.2),
        _chip("M4 Max", 410, 546, tflops=18.4),
        _chip("M5", 153, tflops=8.3), _chip("M5 Pro", 307, tflops=16.5), _chip("M5 Max", 460, 614, tflops=33),
    )
}  # fmt: skip


def find_chip(brand: str) -> Chip | None:
    """The chip that the system calls "Apple M4 Pro", and a user "m4-pro"; None for one that is not in the table."""
    words = brand.lower().replace("-", " ").split()
    wanted = " ".join(words[1:] if words[:1] == ["apple"] else words)
    return next((chip for name, chip in CHIPS.items() if name.lower() == wanted), None)


def chip_option(chip: Chip) -> str:
    """A chip as one writes it on the command line: `m4-pro`."""
    return chip.name.lower().replace(" ", "-")
