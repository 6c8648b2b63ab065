"""Measured configurations put beside what the model of speed says of them. Pure arithmetic over what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlxmoe.tuning.fit import TimedStep, fit_rates
from mlxmoe.tuning.roofline import Rates, Step, decode_s, prefill_s
from mlxmoe.tuning.search import Measured
from mlxmoe.tuning.tuned_report import PrefillRow, TuneRow
from mlxmoe.tuning.workload import Workload


def predicted_rows(
    work: Workload, measured: Sequence[Measured], prefill: Sequence[PrefillRow], sync_s: float
) -> tuple[tuple[TuneRow, ...], Rates | None]:
    """A row for each configuration, by context and slots, and the constants that were fitted to them.

    A row is predicted from what was counted in it: the experts that were read, and how much of them from the disk.
    `sync_s`: of a host sync, measured by itself.
    None where nothing could be measured.
    """
    usable = [row for row in measured if row.usable]
    rates = None
    if usable:
        rates = fit_rates([TimedStep(_step(work, row), row.decoded.step_s) for row in usable], sync_s)
        rates = _with_prefill(work, usable[0], prefill, rates)
    rows = [_row(work, row, rates) for row in measured]
    return tuple(sorted(rows, key=lambda row: (row.context, row.plan.bank_bytes))), rates


def _row(work: Workload, measured: Measured, rates: Rates | None) -> TuneRow:
    plan, context, seen = measured.point.plan, measured.point.context, measured.decoded
    predicts = rates is not None and seen.tokens > 0
    return TuneRow(
        context=context,
        plan=plan,
        expert_share=plan.bank_bytes / plan.expert_bytes if plan.expert_bytes else None,
        full_tokens_per_s=seen.tokens_per_s,
        tokens=seen.tokens,
        hit_rate=seen.hit_rate if seen.hits + seen.misses else None,
        predicted_tokens_per_s=1 / decode_s(_step(work, measured), rates) if predicts and rates else None,
        first_token_s=None if rates is None else prefill_s(work.prompt(plan, context - 1), rates),
        pressure=seen.pressure,
        overrun=seen.overrun,
    )


def _step(work: Workload, measured: Measured) -> Step:
    """What a token of it asked for, as it was counted. Where nothing tells the disk's part, all was read from it."""
    plan, seen = measured.point.plan, measured.decoded
    hits = {layer.path: (lambda share: 1.0) for layer in work.opened.layers}
    step = work.step(plan, hits, measured.point.context)
    each = plan.expert_bytes / max(1, sum(layer.num_experts for layer in work.opened.layers))
    disk_bytes = seen.read_bytes if seen.disk_bytes is None else seen.disk_bytes
    misses = seen.read_bytes / each / seen.tokens if each else 0.0
    return replace(step, misses=misses, missing_bytes=disk_bytes / seen.tokens)


def _with_prefill(work: Workload, row: Measured, prefill: Sequence[PrefillRow], rates: Rates) -> Rates:
    """With the rate of the fastest prompt: of the time it took, what was not reading is computing."""
    if not prefill:
        return rates
    best = max(prefill, key=lambda row: row.tokens_per_s)
    prompt = work.prompt(row.point.plan, best.chunk_tokens)
    seconds = best.chunk_tokens / best.tokens_per_s
    reading = prefill_s(replace(prompt, flops=0.0), replace(rates, flops_per_s=1.0)) or 0.0
    return replace(rates, flops_per_s=prompt.flops / max(seconds - reading, seconds / 2), prefill_efficiency=1.0)
