"""mlxmoe tune: measure this machine with a model, show measured beside predicted, and keep what is best."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

import mlxmoe
from mlxmoe import RequestError
from mlxmoe.cli import common
from mlxmoe.memory.sizes import format_bytes

if TYPE_CHECKING:
    from mlxmoe import TuneReport, TuneRow
    from mlxmoe.hub import Progress as LoadProgress
    from mlxmoe.tuning.run import TuneProgress
    from mlxmoe.tuning.tuned_report import Goal


@common.reported
def tune(
    model: common.ModelArgument = None,
    goal: Annotated[
        str | None,
        typer.Option(
            help="speed, context (the longest) or balanced: the longest that keeps 3/4 of the speed.",
            show_default="balanced",
        ),
    ] = None,
    min_tps: Annotated[
        float | None,
        typer.Option("--min-tps", help="The longest context that keeps so many tokens/s.", show_default=False),
    ] = None,
    budget: Annotated[str, typer.Option(help="Time for measuring: 90s, 5m or 1h. Loading is not in it.")] = "5m",
    context: common.Contexts = None,
    memory: common.Memory = None,
    window: common.Window = None,
    sinks: common.Sinks = 4,
    kv_bits: common.KVBits = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw speed, memory and the Pareto front to this .png file.", show_default=False),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="Keep what is best, so that later loads take it.")
    ] = True,
    forget: Annotated[bool, typer.Option("--forget", help="Remove what was kept of this model, and end.")] = False,
    as_json: common.AsJSON = False,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    debug: common.Debug = False,
) -> None:
    """Measure which context and expert budget suit a model on this machine, and keep that for later loads."""
    from mlxmoe.cli.tune_plot import draw, refuse_without_matplotlib
    from mlxmoe.tuning.tuner import forget as forget_tuning

    if forget:
        count = forget_tuning(model, revision)
        typer.echo(f"{count} kept tuning{'' if count == 1 else 's'} of {model or 'the built-in demo model'} removed")
        return
    if plot is not None:
        refuse_without_matplotlib()
        if not plot.expanduser().parent.is_dir():
            raise RequestError(f"--plot {plot}: there is no folder {plot.parent}. Make it, or choose another place.")
    with _progress() as (measuring, loading):
        report = mlxmoe.tune(
            model,
            goal=cast("Goal | None", goal),  # checked there
            min_tps=min_tps,
            budget=budget,
            contexts=None if context is None else context.split(","),
            memory=memory,
            window=window,
            sinks=sinks,
            kv_bits=kv_bits,
            save=save,
            progress=measuring,
            load_progress=loading,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    if plot is not None:
        draw(report, plot)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _show(report)
    if report.recommended is None or (save and report.saved is None):
        raise typer.Exit(1)


class _TimeLeft(ProgressColumn):
    """What is left of the budget, going down by itself between two measurements; nothing while loading."""

    def render(self, task: Task) -> Text:
        if not task.fields["timed"]:
            return Text("")
        left = max(0, int((task.total or 0) - (task.elapsed or 0)))
        return Text(f"{left // 60}:{left % 60:02d} left")


@contextmanager
def _progress() -> Iterator[tuple[TuneProgress, LoadProgress]]:
    """A bar on stderr, for measuring and for loading; nothing where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), _TimeLeft())
    with Progress(*columns, console=common.notes, transient=True, disable=not common.notes.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def task(name: str, total: float, timed: bool) -> TaskID:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total, timed=timed)
            return tasks[name]

        def measuring(done_s: float, total_s: float, what: str) -> None:
            if "Measuring" not in tasks:
                bar.console.print(
                    f"Measuring for {total_s:.0f} s at most; Ctrl-C keeps what was measured.", style="dim"
                )
            number = task("Measuring", total_s, True)
            bar.update(number, completed=done_s, description=f"Measuring {what}")

        def loading(stage: str, done: int, total: int) -> None:
            number = task({"download": "Downloading", "load": "Loading"}[stage], total, False)
            bar.update(number, completed=done, total=total, visible=done < total)

        yield measuring, loading


def _show(report: TuneReport) -> None:
    out = Console(highlight=False)
    name = report.model or "built-in demo model"
    out.print(f"{name} ({report.model_type}) on {report.machine}", markup=False, soft_wrap=True)
    out.print(f"an engine gets {format_bytes(report.budget_bytes)}; measured for {report.seconds:.0f} s\n")
    for line in _constants(report):
        out.print(line, markup=False, soft_wrap=True)
    out.print()
    out.print(_table(report))
    out.print("first token: predicted; no figure of another machine is in here\n", style="dim")
    if report.ended == "interrupted":
        out.print("Interrupted: this is what was measured until then.", style="yellow")
    if report.recommended is not None:
        out.print(f"Take   {report.load_line}", style="bold", markup=False, soft_wrap=True)
        out.print(f"or     {report.flags or 'no flags: what fits'}", markup=False, soft_wrap=True)
    for reason in report.reasons:
        out.print(f"- {reason}", markup=False, soft_wrap=True)
    if report.saved is not None:
        out.print(f"Kept for later loads: {report.saved}", style="dim", markup=False, soft_wrap=True)
    for note in report.notes:
        out.print(f"- {note}", style="dim", markup=False, soft_wrap=True)


def _constants(report: TuneReport) -> Iterator[str]:
    """What the machine does, as measured or as fitted to what was measured."""
    if report.read_bytes_per_s is not None:
        rate = format_bytes(int(report.read_bytes_per_s))
        where = "from the disk" if report.read_cold else "perhaps from a cache"
        yield f"reads       {rate}/s of the model's own files, {where} (measured)"
    if any(row.hit_rate is not None for row in report.rows):
        yield f"sync        {report.sync_s * 1e3:.2f} ms to ask which experts a layer wants (measured)"
    rates = report.rates
    if rates is not None:
        streams = ""
        if any(row.hit_rate is not None for row in report.rows):
            streams = (
                f", {rates.sync_s * 1e3:.2f} ms a streaming layer, {rates.miss_s * 1e3:.2f} ms a miss and its read"
            )
        weights = format_bytes(int(rates.bandwidth_bytes_per_s))
        yield f"decode      weights at {weights}/s{streams} (fitted to the rows)"
    for row in report.prefill:
        yield f"prefill     {row.tokens_per_s:.1f} tokens/s in chunks of {row.chunk_tokens} (measured)"


def _table(report: TuneReport) -> Table:
    moe = any(row.expert_share is not None for row in report.rows)
    experts = ("experts\nin slots", "share", "hits\nmeasured") if moe else ()
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("context", "KV", *experts, "tokens/s\nmeasured", "tokens/s\npredicted", "first\ntoken"):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    table.add_column("")
    for row in report.rows:
        chosen = row is report.recommended
        table.add_row(*_cells(row, moe, chosen), style="bold" if chosen else None if row.usable else "dim")
    return table


def _cells(row: TuneRow, moe: bool, chosen: bool) -> list[str]:
    from mlxmoe.tuning.report import percent

    hits = "" if row.hit_rate is None else percent(row.hit_rate)
    share = "" if row.expert_share is None else percent(row.expert_share)
    return [
        f"{'→ ' if chosen else ''}{row.context}",
        format_bytes(row.plan.kv_bytes),
        *((format_bytes(row.plan.bank_bytes), share, hits) if moe else ()),
        f"{row.full_tokens_per_s:.2f}" if row.tokens else "",
        "" if row.predicted_tokens_per_s is None else f"{row.predicted_tokens_per_s:.2f}",
        "" if row.first_token_s is None else f"{row.first_token_s:.1f} s",
        "stopped: memory pressure" if row.pressure else "no time" if row.overrun else "",
    ]
