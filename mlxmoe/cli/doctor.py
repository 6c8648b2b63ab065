"""mlxmoe doctor: the machine as a table, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from mlxmoe.cli import common
from mlxmoe.memory.sizes import format_bytes

if TYPE_CHECKING:
    from mlxmoe.doctor import Facts, Report
    from mlxmoe.doctor.disk import Disk
    from mlxmoe.doctor.facts import ModelFacts


@common.reported
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, or a hub id that was downloaded before: read from for two seconds.", show_default=False
        ),
    ] = None,
    as_json: common.AsJSON = False,
    revision: common.Revision = None,
    debug: common.Debug = False,
) -> None:
    """Look at this machine, and at a model's files on it. Exits with 1 if something is wrong; downloads nothing."""
    from mlxmoe.doctor import examine

    report = examine(model, revision=revision)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _show(report)
    if not report.healthy:
        raise typer.Exit(1)


def _show(report: Report) -> None:
    out = Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(report.facts):
        table.add_row(name, value)
    out.print(table)
    for finding in report.findings:
        out.print()
        wrong = finding.level == "wrong"
        out.print(f"{'Wrong' if wrong else 'Note'}: {finding.what}", style="red" if wrong else "bold", markup=False)
        out.print(f"  Why: {finding.why}", markup=False)
        out.print(f"  What to do: {finding.what_to_do}", markup=False)
    if report.healthy:
        out.print("\nNothing is wrong.")


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    reading = facts.reading
    yield "system", facts.system
    yield "chip", f"{facts.chip}{'' if facts.gpu else ', MLX on the CPU'}"
    if facts.bandwidth is not None:
        least, most = facts.bandwidth.least_bytes_per_s, facts.bandwidth.most_bytes_per_s
        yield (
            "bandwidth",
            f"{format_bytes(least)}/s{'' if least == most else f' to {format_bytes(most)}/s'} (published)",
        )
    yield (
        "memory",
        (
            f"{format_bytes(reading.total_bytes)}, {format_bytes(reading.available_bytes)} available, "
            f"{format_bytes(facts.usable_bytes)} usable by a model now"
        ),
    )
    if reading.working_set_bytes is not None:
        yield "GPU working set", format_bytes(reading.working_set_bytes)
    yield "pressure", reading.pressure
    yield "swap used", format_bytes(reading.swap_used_bytes)
    yield "open files", f"{facts.open_files} at most"
    free = "" if facts.cache_free_bytes is None else f", {format_bytes(facts.cache_free_bytes)} free"
    yield "downloads", f"{facts.cache_folder}: {_disk(facts.cache_disk)}{free}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    if facts.model is not None:
        yield from _model_rows(facts.model, facts.streams)


def _model_rows(model: ModelFacts, streams: bool) -> Iterator[tuple[str, str]]:
    if not model.files:
        return
    where = "experts stream" if streams else "fits in memory"
    files = f"{model.files} file{'' if model.files == 1 else 's'}"
    yield "model", f"{model.path}: {format_bytes(model.nbytes)} in {files}, {where}, {_disk(model.disk)}"
    rate = model.rate
    if rate is None:
        yield "reading it", "not measured: there is too little to read"
        return
    if rate.disk_share is None:
        source = "from the disk or the page cache, the system does not tell"
    elif rate.cold:
        source = "from the disk"
    else:
        source = f"only {rate.disk_share:.0%} of it from the disk: this is not the disk's rate"
    yield (
        "reading it",
        (f"{format_bytes(int(rate.bytes_per_s))}/s in pieces of {format_bytes(rate.piece_bytes)}, {source}"),
    )


def _disk(disk: Disk) -> str:
    names = {
        "ssd": "SSD", "rotational": "rotating disk", "network": "network drive", "memory": "in memory",
        "virtual": "virtual disk", "unknown": "disk of unknown kind",
    }  # fmt: skip
    return f"{'external ' if disk.external else ''}{names[disk.kind]}"
