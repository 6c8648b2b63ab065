"""The picture of mlxmoe tune --plot: speed and memory by context, and the Pareto front. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxmoe import MlxMoeError, TuneReport, TuneRow
from mlxmoe.cli.routing_plot import INK, LINE, refuse_without_matplotlib
from mlxmoe.tuning.tuned_report import pareto
from mlxmoe.writing import replacing

__all__ = ["draw", "refuse_without_matplotlib"]

PARTS = (
    ("trunk", "trunk_bytes", "#5b6770"),
    ("experts in slots", "bank_bytes", "#1f6f8b"),
    ("KV cache", "kv_bytes", "#e08e45"),
    ("prefill", "prefill_bytes", "#c4b7a6"),
    ("MLX's pool", "pool_bytes", "#e2ded6"),
)


def draw(report: TuneReport, path: Path) -> None:
    """Write the PNG `path`, which takes its place when it is whole. Raises MlxMoeError."""
    from matplotlib.figure import Figure  # an extra: only who draws needs it

    usable = [row for row in report.rows if row.usable]
    best = [
        max((row for row in usable if row.context == context), key=lambda row: row.full_tokens_per_s)
        for context in sorted({row.context for row in usable})
    ]
    figure = Figure(figsize=(14, 4.5), layout="constrained", dpi=144)
    speed, memory, front = figure.subplots(1, 3)
    _draw_speed(speed, best)
    _draw_memory(memory, best)
    _draw_front(front, report, usable)
    for axes in (speed, memory, front):
        axes.spines[["top", "right"]].set_visible(False)
    try:
        with replacing(path.expanduser(), durable=False) as file:
            figure.savefig(file, format="png")
    except OSError as error:
        raise MlxMoeError(f"{path} cannot be written: {error.strerror or error}. Choose another place.") from error


def _draw_speed(axes: Any, best: list[TuneRow]) -> None:
    places = range(len(best))
    axes.plot(
        places, [row.full_tokens_per_s for row in best], color=LINE, marker="o", linewidth=2.5, label="measured"
    )
    predicted = [row.predicted_tokens_per_s for row in best]
    axes.plot(places, predicted, color=INK, marker="x", linestyle=":", label="predicted")
    axes.set(title="Decode with the context full", xlabel="context, tokens", ylabel="tokens/s")
    axes.set_ylim(bottom=0)
    _name_contexts(axes, best)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _draw_memory(axes: Any, best: list[TuneRow]) -> None:
    tallest = max((row.plan.total_bytes for row in best), default=0)
    unit, name_of_unit = (1e9, "GB") if tallest >= 1e9 else (1e6, "MB")
    below = [0.0] * len(best)
    for name, field, color in PARTS:
        sizes = [getattr(row.plan, field) / unit for row in best]
        axes.bar(range(len(best)), sizes, bottom=below, color=color, label=name, width=0.6)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    if best and (budget := best[0].plan.memory_bytes) < 3 * tallest:  # else the bars would be too low to see
        axes.axhline(budget / unit, color=INK, linewidth=1, linestyle=":", label="what an engine gets")
    axes.set(title="Memory as planned", xlabel="context, tokens", ylabel=name_of_unit)
    _name_contexts(axes, best)
    handles, names = axes.get_legend_handles_labels()
    axes.set_ylim(top=1.4 * axes.get_ylim()[1])  # for the legend
    axes.legend(handles[::-1], names[::-1], frameon=False, fontsize="small", ncols=2, loc="upper left")


def _draw_front(axes: Any, report: TuneReport, usable: list[TuneRow]) -> None:
    contexts, speeds = [row.context for row in usable], [row.full_tokens_per_s for row in usable]
    axes.scatter(contexts, speeds, color=INK, alpha=0.4, s=20, label="measured")
    front = pareto(report.rows)
    axes.plot([row.context for row in front], [row.full_tokens_per_s for row in front], color=LINE, linewidth=2,
              label="Pareto front")  # fmt: skip
    if report.recommended is not None:
        chosen = report.recommended
        axes.scatter(
            [chosen.context], [chosen.full_tokens_per_s], color="#c2452d", s=70, zorder=3, label="recommended"
        )
    if report.min_tokens_per_s is not None:
        axes.axhline(report.min_tokens_per_s, color=INK, linewidth=1, linestyle=":", label="asked for")
    axes.set(title="Context against speed", xlabel="context, tokens", ylabel="tokens/s, measured", xscale="log")
    axes.set_xticks(sorted(set(contexts)), [str(context) for context in sorted(set(contexts))])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _name_contexts(axes: Any, best: list[TuneRow]) -> None:
    axes.set_xticks(range(len(best)), [str(row.context) for row in best])
