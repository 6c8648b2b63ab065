"""The table of `mlxmoe plan --together`: a row for each number of replies at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from mlxmoe.memory.sizes import format_bytes
from mlxmoe.tuning.report import PlanReport, TogetherPlan, percent, rate_down

HEADS = ("replies\nat once", "context\nof each", "KV\nof all")
EXPERT_HEADS = ("experts\nin slots", "hits")
SPEED_HEADS = ("tokens/s, all\nempty → full", "each,\nfull")


def together_table(report: PlanReport) -> Table:
    moe = report.expert_bytes > 0
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in (*HEADS, *(EXPERT_HEADS if moe else ()), *SPEED_HEADS):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    table.add_column("verdict", no_wrap=True)
    for row in report.together:
        table.add_row(*together_cells(row, moe))
    return table


def together_cells(row: TogetherPlan, moe: bool) -> list[str]:
    """The row as text; `moe`: with what it has of experts."""
    if row.plan is None:
        return [str(row.replies), str(row.context), *[""] * (5 if moe else 3), row.verdict]
    experts = ["" if share is None else percent(share) for share in (row.expert_share, row.hit_rate)] if moe else []
    first, full, each = row.tokens_per_s, row.full_tokens_per_s, row.each_tokens_per_s
    return [
        str(row.replies),
        str(row.context),
        format_bytes(row.plan.kv_bytes),
        *experts,
        "?" if first is None or full is None else f"{rate_down(first)} → {rate_down(full)}",
        "?" if each is None else rate_down(each),
        row.verdict,
    ]


def together_markdown(reports: Sequence[PlanReport]) -> str:
    """The rows of all `reports` as one table in Markdown, as the docs have it."""
    heads = [head.replace("\n", " ") for head in (*HEADS, *EXPERT_HEADS, *SPEED_HEADS)]
    lines = ["| model | " + " | ".join(heads) + " | verdict |", "| --- |" + " ---: |" * len(heads) + " --- |"]
    for report in reports:
        name = Path(report.model).name.removesuffix(".json")
        for row in report.together:
            lines.append("| " + " | ".join([name, *together_cells(row, moe=True)]) + " |")
    return "\n".join(lines) + "\n"
