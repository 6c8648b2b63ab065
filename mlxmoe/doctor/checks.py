"""What the facts mean: pure functions from facts to findings, each with its reason and what to do about it.

Only advice with a reason is given. Much that the web recommends does nothing or harm on macOS (I/O schedulers, GPU
clocks, switching off memory compression, raising the GPU's wired limit), and is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from mlxmoe.doctor.facts import Facts
from mlxmoe.memory.sizes import format_bytes

LEAST_MEMORY_BYTES = 8 * 10**9
LEAST_FREE_DISK_BYTES = 5 * 10**9
SLOW_DISK_BYTES_PER_S = 10**9  # below what SSDs on PCI Express give: SATA, USB or worse
OTHER_FILES = 64  # open beside the model's: libraries, sockets, the terminal


@dataclass(frozen=True, slots=True)
class Finding:
    """`level`: "wrong" is worth doing something about, "note" is worth knowing."""

    level: Literal["note", "wrong"]
    what: str
    why: str
    what_to_do: str


def judge(facts: Facts) -> tuple[Finding, ...]:
    """All findings, what is wrong first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return tuple(sorted(found, key=lambda finding: finding.level != "wrong"))


def check_packages(facts: Facts) -> Iterator[Finding]:
    for sentence in facts.unmet:
        yield Finding(
            "wrong",
            f"{sentence}.",
            "mlxmoe runs mlx-lm's own model code, and its tests hold it exact with the versions it declares only.",
            "pip install --upgrade mlxmoe",
        )


def check_gpu(facts: Facts) -> Iterator[Finding]:
    if facts.gpu:
        return
    if facts.platform == "darwin":
        yield Finding(
            "wrong",
            "MLX finds no GPU on this Mac.",
            "Without Metal everything is computed on the CPU, many times slower. A virtual machine often has no "
            "Metal that MLX can use.",
            "Run it on macOS itself, on a Mac with Apple silicon.",
        )
    else:
        yield Finding(
            "note",
            "MLX computes on the CPU here.",
            "It is exact and slow: good for tests, not for use.",
            "Nothing; for speed, a Mac with Apple silicon.",
        )


def check_memory(facts: Facts) -> Iterator[Finding]:
    reading = facts.reading
    if reading.limit_bytes is not None:
        yield Finding(
            "note",
            f"A control group limits this process to {format_bytes(reading.limit_bytes)}.",
            "Beyond it the kernel ends processes without warning, so it counts as all the memory there is.",
            "Nothing, or raise the container's or the service's memory limit.",
        )
    elif 0 < reading.total_bytes < LEAST_MEMORY_BYTES:
        yield Finding(
            "wrong",
            f"There are {format_bytes(reading.total_bytes)} of memory in all.",
            "After the system's own and the model's trunk, little is left for experts, and every miss is a read from "
            "disk.",
            "Take a small model, and close other programs.",
        )


def check_pressure(facts: Facts) -> Iterator[Finding]:
    reading = facts.reading
    if reading.pressure == "normal":
        return
    swap = f", and {format_bytes(reading.swap_used_bytes)} are in swap" if reading.swap_used_bytes else ""
    yield Finding(
        "wrong",
        f"Memory pressure is {reading.pressure}: {format_bytes(reading.available_bytes)} are available{swap}.",
        "What a model takes now, the system takes away from running programs by compressing and swapping, and both "
        "become many times slower.",
        "Close programs that use much memory, then look again; or give mlxmoe less: --memory 8GB.",
    )


def check_wired_limit(facts: Facts) -> Iterator[Finding]:
    limit, total = facts.wired_limit_bytes, facts.reading.total_bytes
    if limit is None or not total:
        return
    if total - limit < total // 8:
        yield Finding(
            "wrong",
            f"iogpu.wired_limit_mb lets the GPU hold {format_bytes(limit)} of {format_bytes(total)}.",
            "What the GPU holds can be neither compressed nor swapped. macOS' own default leaves a quarter or so to "
            "everything else; with much less, freezes and kernel panics are reported. mlxmoe does not need it: what "
            "does not fit is streamed.",
            "sudo sysctl iogpu.wired_limit_mb=0 (macOS' default; a restart does the same unless it is set at start)",
        )
    elif limit < total // 2:
        yield Finding(
            "wrong",
            f"iogpu.wired_limit_mb holds the GPU to {format_bytes(limit)} of {format_bytes(total)}.",
            "Somebody set it below macOS' own default of two thirds or more: fewer experts fit than could.",
            "sudo sysctl iogpu.wired_limit_mb=0 (macOS' default; a restart does the same unless it is set at start)",
        )


def check_open_files(facts: Facts) -> Iterator[Finding]:
    files = facts.model.files if facts.model else 0
    need = OTHER_FILES + 2 * files
    if 0 <= facts.open_files < need:
        yield Finding(
            "wrong",
            f"This process may open {facts.open_files} files; {need} are needed"
            f"{f' for a model of {files} files' if files else ''}.",
            "The reader of experts keeps each of the model's files open, and so does MLX while it loads. mlx-lm sets "
            "this limit to 2048 when it is imported, whatever `ulimit -n` says.",
            "Write the model in fewer files: mlx_lm.convert makes files of some 5 GB.",
        )


def check_free_disk(facts: Facts) -> Iterator[Finding]:
    free = facts.cache_free_bytes
    if free is not None and free < LEAST_FREE_DISK_BYTES:
        yield Finding(
            "wrong",
            f"{facts.cache_folder} has {format_bytes(free)} free.",
            "Hardly a model fits, and macOS puts its swap on the same disk: when that is full, programs are ended.",
            "Free some space, or set HF_HOME to a folder on a larger disk.",
        )


def check_model_files(facts: Facts) -> Iterator[Finding]:
    if facts.model is not None and facts.model.problem is not None:
        yield Finding(
            "wrong",
            facts.model.problem,
            "The model cannot be loaded as it lies there.",
            "Download or convert it again.",
        )


def check_model_disk(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    if model is None:
        return
    level: Literal["note", "wrong"] = "wrong" if facts.streams else "note"
    consequence = (
        "More than memory holds, so its experts are read from there while it answers"
        if facts.streams
        else "It fits in memory, so only loading is slow"
    )
    if model.disk.kind == "network":
        yield Finding(
            level,
            f"{model.path} lies on a network drive.",
            f"{consequence}. A network gives a tenth of an SSD's rate or less, and a read fails when it drops out.",
            "Copy the model to the machine's own SSD.",
        )
    elif model.disk.kind == "rotational":
        yield Finding(
            level,
            f"{model.path} lies on a rotating disk.",
            f"{consequence}. Experts lie scattered, and each seek takes some 10 ms: a token takes seconds.",
            "Copy the model to an SSD.",
        )
    elif model.rate is not None and model.rate.cold and model.rate.bytes_per_s < SLOW_DISK_BYTES_PER_S:
        where = "an external disk" if model.disk.external else "the disk"
        yield Finding(
            level,
            f"The model's files are read at {format_bytes(int(model.rate.bytes_per_s))}/s from {where}.",
            f"{consequence}. At this rate each GB of experts that is not in memory takes "
            f"{10**9 / max(1.0, model.rate.bytes_per_s):.1f} s.",
            "Copy the model to the machine's own SSD, or to one behind Thunderbolt or USB4.",
        )


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_packages,
    check_gpu,
    check_memory,
    check_pressure,
    check_wired_limit,
    check_open_files,
    check_free_disk,
    check_model_files,
    check_model_disk,
)
