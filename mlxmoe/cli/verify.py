"""mlxmoe verify: the proof, as a table."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from mlxmoe.cli import common
from mlxmoe.verify import VerifyReport, VerifyRow
from mlxmoe.verify import verify as run_verify


@common.reported
def verify(
    model: common.ModelArgument = None,
    memory: common.Memory = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Compare layer by layer even if the whole model fits.")
    ] = False,
    revision: common.Revision = None,
    debug: common.Debug = False,
) -> None:
    """Compare streaming with stock mlx-lm, bit for bit, at every cache size. Exits with 1 on any difference."""
    with common.notes.status("Loading stock mlx-lm") as status:

        def show(row: VerifyRow) -> None:
            status.update(f"experts {row.experts}: {row.part}")

        report = run_verify(
            model, memory=memory, layer_by_layer=True if layers else None, revision=revision, on_row=show
        )
    _print(report)
    if not report.identical:
        raise typer.Exit(1)


def _print(report: VerifyReport) -> None:
    out = Console(highlight=False)
    if not report.whole:
        out.print("Each MoE layer compared by itself, on its real inputs (the whole model twice does not fit):")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for heading in ("experts", "slots", "part"):
        table.add_column(heading, no_wrap=True)
    for heading in ("values", "differ", "largest", "misses", "evicted"):
        table.add_column(heading, no_wrap=True, justify="right")
    for row in report.rows:
        low, high = row.slots
        table.add_row(
            row.experts,
            f"{low}" if low == high else f"{low}-{high}",
            row.part,
            f"{row.values:,}",
            f"{row.differing:,}",
            f"{row.largest:.2g}",
            f"{row.misses:,}",
            f"{row.evictions:,}",
            style="red" if row.differing else None,
        )
    out.print(table)
    if report.identical:
        out.print(
            f"{report.model}: bit-identical to stock mlx-lm, {report.values:,} values compared.", soft_wrap=True
        )
    else:
        worst = sum(row.differing for row in report.rows)
        out.print(f"{report.model}: {worst:,} of {report.values:,} values DIFFER from stock mlx-lm.", soft_wrap=True)
