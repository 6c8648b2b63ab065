"""The machine that is planned for: what of its memory an engine can have, and its rates. With where each is from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mlxmoe.errors import PlanError
from mlxmoe.memory.chips import CHIPS, Chip, chip_option, find_chip
from mlxmoe.memory.reading import MemoryReader, Reading, reserve_bytes, usable_bytes
from mlxmoe.memory.sizes import format_bytes, parse_bytes
from mlxmoe.memory.sources import Sources
from mlxmoe.tuning.roofline import READ_BYTES_PER_S, Rates

# Of a Mac's memory, what the GPU recommends to keep at most: reported as 2/3 of 16 and 32 GB, 3/4 from 36 GB on;
# newer systems give more. On the machine itself it is asked for.
GPU_SHARE, GPU_SHARE_LARGE, LARGE_BYTES = 2 / 3, 3 / 4, 36 * 10**9
SOLD_GB = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)


@dataclass(frozen=True, slots=True)
class Target:
    """A machine. `budget_bytes`: what an engine may take of `total_bytes`.

    `chip`: None where it is not in the table, and then `rates` is None, unless given: nothing is said about speed.
    `rates_basis`: what is published of the chip, with assumptions, or given by the caller. `assumptions`: where the
    figures come from, a sentence each.
    """

    total_bytes: int
    budget_bytes: int
    chip: Chip | None
    rates: Rates | None
    rates_basis: Literal["published", "given"]
    assumptions: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.chip.name if self.chip else 'unknown chip'}, {format_bytes(self.total_bytes)}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_target(
    memory: int | str | None = None,
    chip: str | None = None,
    read_rate: int | str | None = None,
    rates: Rates | None = None,
    reading: Reading | None = None,
) -> Target:
    """The machine that these describe, this one where they are None.

    `memory`: of the whole machine. `rates`: measured ones, which go before the table's. `reading`: what this machine
    says, asked for where None. Raises PlanError for an unknown chip, MemoryBudgetError for a size that is none.
    """
    said: list[str] = []
    total, budget = _memory(memory, reading, said)
    found = _chip(chip)
    basis: Literal["published", "given"] = "published" if rates is None else "given"
    if rates is not None:
        said.append("the rates are those that were given")
    elif found is not None:
        rates = _published(found, said)
    if read_rate is not None:
        rates = _with_read_rate(rates, read_rate, said)
    if rates is None:
        said.append("no speed is predicted: this machine's chip is not in the table; name one with chip=")
    return Target(total, budget, found, rates, basis, tuple(said))


def _memory(memory: int | str | None, reading: Reading | None, said: list[str]) -> tuple[int, int]:
    if memory is None:
        reading = reading or MemoryReader().read()
        budget = usable_bytes(reading)
        said.append(
            f"an engine gets {format_bytes(budget)}: what this machine has free now, less a reserve of "
            f"{format_bytes(reserve_bytes(reading))}"
        )
        return reading.total_bytes, budget
    total = parse_bytes(memory, "memory")
    share = GPU_SHARE if total < LARGE_BYTES else GPU_SHARE_LARGE
    budget = int(total * share)
    said.append(
        f"an engine gets {format_bytes(budget)} of {format_bytes(total)}, {'2/3' if share == GPU_SHARE else '3/4'}: "
        f"what a Mac's GPU is reported to recommend; the rest is the system's, other programs' and the page cache's"
    )
    if total % 10**9 == 0 and total // 10**9 in SOLD_GB:
        gb = total // 10**9
        said.append(
            f"GB are 10**9 bytes here; a Mac sold with {gb} GB has {gb} GiB, {format_bytes(gb * 2**30)}: for that "
            f"write {gb}GiB"
        )
    return total, budget


def _chip(name: str | None) -> Chip | None:
    if name is None:
        return find_chip(Sources().chip_brand() or "")
    chip = find_chip(name)
    if chip is None:
        raise PlanError(f"There is no chip {name!r} in the table: {', '.join(map(chip_option, CHIPS.values()))}.")
    return chip


def _published(chip: Chip, said: list[str]) -> Rates:
    least, most = chip.least_bytes_per_s, chip.most_bytes_per_s
    said.append(
        f"{chip.name} reads memory at {format_bytes(least)}/s (published)"
        + ("" if least == most else f", {format_bytes(most)}/s with its largest GPU")
    )
    read = chip.ssd_bytes_per_s
    if read is None:
        said.append(f"the SSD gives {format_bytes(READ_BYTES_PER_S)}/s: a guess; read_rate= says better")
    else:
        said.append(f"the SSD gives {format_bytes(read)}/s (published for one Mac with {chip.name})")
    return Rates(least, chip.flops_per_s, READ_BYTES_PER_S if read is None else read)


def _with_read_rate(rates: Rates | None, read_rate: int | str, said: list[str]) -> Rates | None:
    read = parse_bytes(read_rate, "read_rate")
    if rates is None:
        return None
    said[:] = [line for line in said if not line.startswith("the SSD")]
    said.append(f"the SSD gives {format_bytes(read)}/s (as asked)")
    return replace(rates, read_bytes_per_s=read)
