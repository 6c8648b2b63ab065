"""The table of `mlxmoe plan --together`: a row for each number of replies at once."""

from __future__ import annotations

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
    """The row as text, without its experts for a dense model."""
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
