"""mlxmoe plan: a table of contexts for one model on one machine, and which to take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

import mlxmoe
from mlxmoe.cli import common
from mlxmoe.memory.sizes import format_bytes

if TYPE_CHECKING:
    from mlxmoe.tuning.report import ContextPlan, PlanReport


@common.reported
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, hub id (its weights are not downloaded) or a config.json; without it the demo model.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of the whole machine, 32GB or 32GiB; by default this one's.", show_default=False),
    ] = None,
    chip: Annotated[
        str | None, typer.Option(help="m1 to m5, with -pro, -max, -ultra; by default this one's.", show_default=False)
    ] = None,
    context: common.Contexts = None,
    experts: common.Experts = "auto",
    window: common.Window = None,
    sinks: common.Sinks = 4,
    kv_bits: common.KVBits = None,
    bits: Annotated[
        int | None,
        typer.Option(help="For weights that are not quantised: as mlx_lm.convert -q would.", show_default=False),
    ] = None,
    read_rate: Annotated[
        str | None, typer.Option(help="What the SSD gives in a second, 5GB; see `doctor`.", show_default=False)
    ] = None,
    together: Annotated[
        str | None,
        typer.Option(help="Replies at once, as `mlxmoe serve` computes them: 1,2,4,8.", show_default=False),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="Routing of this model, from `mlxmoe profile --trace`, in place of guesses.", show_default=False
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table of --together in Markdown.")] = False,
    as_json: common.AsJSON = False,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    debug: common.Debug = False,
) -> None:
    """Say which contexts of a model fit a machine, and how fast it would be. Needs no weights; measures nothing."""
    if markdown and together is None:
        raise mlxmoe.PlanError("--markdown prints the table of --together. Say how many replies: --together 1,2,4,8")
    report = mlxmoe.plan(
        model,
        memory=memory,
        chip=chip,
        contexts=None if context is None else context.split(","),
        experts=experts,
        window=window,
        sinks=sinks,
        kv_bits=kv_bits,
        bits=bits,
        read_rate=read_rate,
        together=None if together is None else together.split(","),
        trace=trace,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    elif markdown:
        from mlxmoe.cli.plan_together import together_markdown

        typer.echo(together_markdown([report]), nl=False)
    else:
        _show(report)


def _show(report: PlanReport) -> None:
    from mlxmoe.cli.plan_together import together_table

    out = Console(highlight=False)
    for line in _head(report):
        out.print(line, markup=False, soft_wrap=True)
    out.print()
    out.print(together_table(report) if report.together else _table(report))
    out.print("all figures in the table are predicted\n", style="dim")
    for number, reason in enumerate(report.people or report.reasons):
        taken = number == 0 and report.recommended is not None and not report.people
        first = "Take " if taken else "" if reason.startswith("Serves ") else "- "
        out.print(f"{first}{reason}", markup=False, soft_wrap=True)
    for warning in report.warnings:
        out.print(f"Warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    out.print("\nNothing was measured. It is assumed that:", style="dim")
    for assumption in report.assumptions:
        out.print(f"- {assumption}", style="dim", markup=False, soft_wrap=True)


def _head(report: PlanReport) -> Iterator[str]:
    basis = "predicted" if report.weights == "config" else "exact"
    yield f"{report.model} ({report.model_type}) on {report.target.name}"
    yield (
        f"parameters   {_count(report.params)}, of which a token uses {_count(report.active_params)}; "
        f"weights {format_bytes(report.weight_bytes)} ({basis})"
    )
    if report.expert_bytes:
        yield (
            f"in memory    {format_bytes(report.trunk_bytes)} trunk and, for one token, "
            f"{format_bytes(report.floor_bytes)} of experts"
        )
        rest = report.expert_bytes - report.floor_bytes
        yield f"on disk      up to {format_bytes(rest)} of the experts may stay there"
    else:
        yield "in memory    all of it: a dense model has no experts that could stay on disk"
    made_for = "" if report.model_context is None else f"; made for {report.model_context} tokens"
    yield f"KV cache     {format_bytes(report.kv_bytes_per_token)} a token{made_for}"


def _table(report: PlanReport) -> Table:
    moe = report.expert_bytes > 0
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    experts = ("experts\nin slots", "hits") if moe else ()
    for name in ("context", "KV", "prefill\npeak", *experts, "tokens/s\nempty → full", "first\ntoken"):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    table.add_column("verdict", no_wrap=True)
    for row in report.contexts:
        chosen = row is report.recommended
        table.add_row(*_cells(row, moe, chosen), style="bold" if chosen else None)
    return table


def _cells(row: ContextPlan, moe: bool, chosen: bool) -> list[str]:
    if row.plan is None:
        return [str(row.context), *[""] * (6 if moe else 4), row.verdict]
    from mlxmoe.tuning.report import percent

    shares = (row.expert_share, row.hit_rate)
    experts = ["" if share is None else percent(share) for share in shares] if moe else []
    return [
        f"{'→ ' if chosen else ''}{row.context}",
        format_bytes(row.plan.kv_bytes),
        format_bytes(row.plan.prefill_bytes),
        *experts,
        "?" if row.tokens_per_s is None else f"{_rate(row.tokens_per_s)} → {_rate(row.full_tokens_per_s or 0)}",
        "?" if row.first_token_s is None else _seconds(row.first_token_s),
        row.verdict,
    ]


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.1f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 180 else f"{seconds / 60:.0f} min"


def _count(params: int) -> str:
    return f"{params / 1e9:.1f} B" if params >= 10**9 else f"{params / 1e6:.1f} M"
