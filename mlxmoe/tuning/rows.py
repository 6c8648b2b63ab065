"""Measured configurations put beside what the model of speed says of them. Pure arithmetic over what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlxmoe.tuning.fit import TimedStep, fit_rates
from mlxmoe.tuning.roofline import HitCurve, Rates, curve_through, decode_s, prefill_s
from mlxmoe.tuning.search import Decoded, Measured
from mlxmoe.tuning.tuned_report import PrefillRow, TuneRow
from mlxmoe.tuning.workload import Workload


def predicted_rows(
    work: Workload, measured: Sequence[Measured], prefill: Sequence[PrefillRow], read_bytes_per_s: float | None
) -> tuple[tuple[TuneRow, ...], Rates | None]:
    """A row for each configuration, by context and slots, and the constants that were fitted to them.

    Hits are predicted by the curve through the measured ones, averaged where a budget was measured with several
    contexts. None where nothing could be measured.
    """
    usable = [row for row in measured if row.usable]
    curve = _hit_curve(usable)
    rates = None
    if usable:
        rates = fit_rates([_timed(work, row, curve) for row in usable], read_bytes_per_s)
        rates = _with_prefill(work, usable[0], prefill, rates)
    rows = [_row(work, row, curve, rates) for row in measured]
    return tuple(sorted(rows, key=lambda row: (row.context, row.plan.bank_bytes))), rates


def _row(work: Workload, measured: Measured, curve: HitCurve, rates: Rates | None) -> TuneRow:
    plan, context, seen = measured.point.plan, measured.point.context, measured.decoded
    curves = {layer.path: curve for layer in work.opened.layers}
    streams = seen.hits + seen.misses > 0
    return TuneRow(
        context=context,
        plan=plan,
        expert_share=_share(measured) if plan.expert_bytes else None,
        full_tokens_per_s=seen.tokens_per_s,
        tokens=seen.tokens,
        hit_rate=seen.hit_rate if streams else None,
        predicted_tokens_per_s=None if rates is None else 1 / decode_s(work.step(plan, curves, context), rates),
        first_token_s=None if rates is None else prefill_s(work.prompt(plan, context - 1), rates),
        pressure=seen.pressure,
    )


def _timed(work: Workload, measured: Measured, curve: HitCurve) -> TimedStep:
    """The step as it was measured: with the misses that were counted."""
    plan, seen = measured.point.plan, measured.decoded
    step = work.step(plan, {layer.path: curve for layer in work.opened.layers}, measured.point.context)
    each = plan.expert_bytes / max(1, sum(layer.num_experts for layer in work.opened.layers))
    misses = seen.misses / seen.tokens
    return TimedStep(replace(step, misses=misses, missing_bytes=misses * each), seen.seconds / seen.tokens)


def _hit_curve(measured: Sequence[Measured]) -> HitCurve:
    by_share: dict[float, Decoded] = {}
    for row in measured:
        if row.decoded.hits + row.decoded.misses:
            share = _share(row)
            by_share[share] = by_share[share] + row.decoded if share in by_share else row.decoded
    return curve_through([(share, seen.hit_rate) for share, seen in by_share.items()])


def _share(measured: Measured) -> float:
    plan = measured.point.plan
    return plan.bank_bytes / plan.expert_bytes


def _with_prefill(work: Workload, row: Measured, prefill: Sequence[PrefillRow], rates: Rates) -> Rates:
    """With the rate of the fastest prompt: of the time it took, what was not reading is computing."""
    if not prefill:
        return rates
    best = max(prefill, key=lambda row: row.tokens_per_s)
    prompt = work.prompt(row.point.plan, best.chunk_tokens)
    seconds = best.chunk_tokens / best.tokens_per_s
    reading = prefill_s(replace(prompt, flops=0.0), replace(rates, flops_per_s=1.0)) or 0.0
    return replace(rates, flops_per_s=prompt.flops / max(seconds - reading, seconds / 2), prefill_efficiency=1.0)
