"""mlxmoe verify: the proof, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mlxmoe.cli import common

if TYPE_CHECKING:
    from mlxmoe.verify import VerifyReport, VerifyRow

COLUMNS = {"experts": 7, "slots": 7, "part": 12, "values": 11, "differ": 9, "largest": 8, "misses": 8, "evicted": 8}


@common.reported
def verify(
    model: common.ModelArgument = None,
    memory: common.Memory = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Compare layer by layer even if the whole model fits.")
    ] = False,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    debug: common.Debug = False,
) -> None:
    """Compare streaming with stock mlx-lm, bit for bit, at every cache size. Exits with 1 on any difference."""
    from mlxmoe.verify import verify as run_verify

    out = Console(highlight=False, soft_wrap=True)
    common.notes.print(
        "Stock mlx-lm answers first; then the same with experts streaming, round by round.", style="dim"
    )
    out.print("".join(_cell(name, width) for name, width in COLUMNS.items()), style="bold")
    with common.progress_bar() as show:
        report = run_verify(
            model,
            memory=memory,
            layer_by_layer=True if layers else None,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=show,
            on_row=lambda row: out.print(_line(row), style=None if row.passed else "red"),
        )
    _print_verdict(out, report)
    if not report.passed:
        raise typer.Exit(1)


def _line(row: VerifyRow) -> str:
    low, high = row.slots
    cells = (
        row.experts,
        f"{low}" if low == high else f"{low}-{high}",
        row.part,
        f"{row.values:,}",
        f"{row.differing:,}",
        f"{row.largest:.2g}",
        f"{row.misses:,}",
        f"{row.evictions:,}",
    )
    return "".join(_cell(text, width) for text, width in zip(cells, COLUMNS.values(), strict=True))


def _cell(text: str, width: int) -> str:
    """Words to the left, numbers to the right."""
    return f"{text:<{width}} " if text[:1].isalpha() and text not in list(COLUMNS)[3:] else f"{text:>{width}} "


def _print_verdict(out: Console, report: VerifyReport) -> None:
    if not report.whole:
        out.print(
            "Compared layer by layer, each on its real inputs: the whole model twice does not fit, or --layers."
        )
    differing = sum(row.differing for row in report.rows)
    if report.identical:
        out.print(f"{report.model}: bit-identical to stock mlx-lm, {report.values:,} values compared.")
    elif report.passed:
        out.print(
            f"{report.model}: decode is bit-identical to stock mlx-lm; in prefill {differing:,} of {report.values:,} "
            f"values differ within what Metal's kernels for several tokens may."
        )
    else:
        out.print(f"{report.model}: {differing:,} of {report.values:,} values DIFFER from stock mlx-lm.")
