"""plan(): a model's sizes, a machine, and how `load` would divide its memory, for several contexts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxmoe.batch.shared import can_share
from mlxmoe.dividing import PrefillRoom, divide_memory
from mlxmoe.errors import (
    CheckpointError,
    MemoryBudgetError,
    ModelError,
    PlanError,
    UnsupportedModelError,
)
from mlxmoe.experts.places import locate_experts
from mlxmoe.experts.trace import Trace
from mlxmoe.kv.settings import KVSettings
from mlxmoe.memory.experts import expert_budget
from mlxmoe.memory.plan import POOL_BYTES, Plan
from mlxmoe.memory.sizes import format_bytes, parse_tokens
from mlxmoe.opening import OpenedModel, open_folder
from mlxmoe.tuning.outline import Outline, outlined
from mlxmoe.tuning.report import TOO_SLOW_TOKENS_PER_S, ContextPlan, PlanReport, Verdict, explain, recommend
from mlxmoe.tuning.roofline import HitCurve, Rates, curve_through, decode_s, default_hit_curve, prefill_s
from mlxmoe.tuning.target import Target, find_target
from mlxmoe.tuning.together import SERVING_CONTEXT, Sharing, parse_replies, people
from mlxmoe.tuning.wanted import Wanted, hits_in, trace_of, wanted_evenly, wanted_in
from mlxmoe.tuning.workload import Workload

CONTEXTS = (4096, 8192, 32768, 131072)
LONG_TEXT_TOKENS = 2**20  # over which KV bytes a token are averaged

Hits = HitCurve | Sequence[tuple[float, float]]


def plan(
    model: str | Path | None = None,
    *,
    memory: int | str | None = None,
    chip: str | None = None,
    contexts: Sequence[int | str] | None = None,
    experts: int | float | str = "auto",
    window: int | None = None,
    sinks: int = 4,
    kv_bits: int | None = None,
    bits: int | None = None,
    hits: Hits | None = None,
    read_rate: int | str | None = None,
    rates: Rates | None = None,
    together: Sequence[int | str] | None = None,
    trace: Trace | str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PlanReport:
    """Predict what of a model fits a machine at each context length, and how fast it would be. Reads no weight.

    - `model`: as for `load`, or a config.json alone. Of a hub id that is not on this machine, config and headers are
      read by small requests.
    - `memory`: of the whole machine, bytes or "32GB"; `chip`: such as "m4-pro". By default this machine, and what it
      has free now.
    - `contexts`: tokens, or "32k"; by default some up to the model's own, or with `together` 8192.
    - `experts`, `window`, `sinks`, `kv_bits`, `revision`, `trust_remote_code`: as for `load`.
    - `bits`: for a model whose weights are not quantised: as `mlx_lm.convert -q --q-bits` would write it.
    - `hits`: what share of lookups hits when a share of the experts is in slots, a function or points `(share, hits)`
      of the model's own routing; by default a guess.
    - `read_rate`: of the SSD, bytes a second or "5GB"; `rates`: all rates, for measured ones.
    - `together`: numbers of replies at once, as `mlxmoe serve` computes them: of each context a row for each of them.
    - `trace`: of this model's routing, or its file: which experts several replies want between them is counted in it,
      and hits are those of an LRU that replays it, unless `hits` are given.

    Raises ModelError, DownloadError, MemoryBudgetError (for sizes that are none), WindowError, SavedStateError or
    PlanError.
    """
    settings = KVSettings(window, sinks, kv_bits)
    lengths = None if contexts is None else sorted({parse_tokens(context) for context in contexts})
    if lengths == []:
        raise PlanError("No context was named. Leave contexts out, or name at least one.")
    replies = [] if together is None else parse_replies(together)
    expert_budget(experts, (), auto_bytes=0)  # what makes no sense is said before anything is fetched
    target = find_target(memory, chip, read_rate, rates)
    with outlined(model, revision, bits) as outline:
        try:
            opened = open_folder(outline.folder, kv_settings=settings, trust_remote_code=trust_remote_code)
        except ModelError as error:
            raise type(error)(str(error).replace(str(outline.folder), outline.name)) from error
        recorded = None if trace is None else trace_of(opened.layers, trace)
        return _report(outline, opened, target, _Asked(lengths, experts, hits, bits, replies, recorded))


@dataclass(frozen=True)
class _Asked:
    """What was asked for, once it makes sense. `replies`: at once, empty where that was not asked."""

    lengths: list[int] | None
    experts: int | float | str
    hits: Hits | None
    bits: int | None
    replies: list[int]
    trace: Trace | None


def _report(outline: Outline, opened: OpenedModel, target: Target, asked: _Asked) -> PlanReport:
    bound = None if opened.kv_choice.endless else opened.model_context
    lengths = _default_contexts(bound, asked) if asked.lengths is None else asked.lengths
    work = Workload.of(opened)
    curves = _curves(opened, asked)
    unreadable = None if outline.weights == "config" else _unreadable(opened, outline)
    rows = list(_rows(opened, work, curves, target, lengths, asked.experts, unreadable))
    chosen = recommend(rows)
    in_one_pass = can_share(opened.config["model_type"], opened.model, opened.kv_choice.caches(opened.model))
    sharing = Sharing(work, curves, _wanted(opened, asked), target.rates, in_one_pass, unreadable)
    together = [sharing.row(row, replies) for row in rows for replies in asked.replies]
    kv = opened.kv
    return PlanReport(
        model=outline.name,
        model_type=opened.config["model_type"],
        weights=outline.weights,
        params=work.params,
        active_params=work.active_params,
        trunk_bytes=opened.trunk_bytes,
        expert_bytes=sum(layer.nbytes for layer in opened.layers),
        floor_bytes=work.floor_bytes,
        kv_bytes_per_token=(kv.of(2 * LONG_TEXT_TOKENS) - kv.of(LONG_TEXT_TOKENS)) // LONG_TEXT_TOKENS,
        model_context=opened.model_context,
        target=target,
        contexts=tuple(rows),
        recommended=chosen,
        reasons=tuple(explain(rows, chosen)),
        assumptions=(
            *_assumptions(outline, opened, target, asked),
            *(sharing.assumptions(asked.trace is not None) if together else ()),
        ),
        warnings=tuple(_warnings(lengths, bound, opened)),
        together=tuple(together),
        people=tuple(people(sharing, rows, asked.replies)),
    )


def _rows(
    opened: OpenedModel,
    work: Workload,
    curves: Mapping[str, HitCurve],
    target: Target,
    lengths: Sequence[int],
    experts: int | float | str,
    unreadable: str | None,
) -> Iterator[ContextPlan]:
    with PrefillRoom(opened) as room:
        for context in lengths:
            if why := _surely_too_much(context, opened, target, experts):
                yield _does_not_fit(context, why)
                continue
            try:
                division = divide_memory(
                    opened, room, experts=experts, memory_bytes=target.budget_bytes,
                    reserve_bytes=target.total_bytes - target.budget_bytes, context=context,
                )  # fmt: skip
            except MemoryBudgetError as error:
                yield _does_not_fit(context, str(error))
                continue
            row = _row(context, division, work, curves, target.rates)
            streams = division.bank_bytes < division.expert_bytes
            yield _does_not_fit(context, unreadable) if unreadable and streams else row


def _default_contexts(bound: int | None, asked: _Asked) -> list[int]:
    """Those within what the model was made for, and that itself; for replies at once one of a conversation's size."""
    contexts = (SERVING_CONTEXT,) if asked.replies else CONTEXTS
    return list(contexts) if bound is None else sorted({min(context, bound) for context in contexts})


def _curves(opened: OpenedModel, asked: _Asked) -> dict[str, HitCurve]:
    hits, layers = asked.hits, opened.layers
    if hits is not None:
        curve = hits if callable(hits) else curve_through(hits)
        return {layer.path: curve for layer in layers}
    if asked.trace is not None:
        return {layer.path: curve for layer, curve in zip(layers, hits_in(asked.trace), strict=True)}
    return {layer.path: default_hit_curve(layer.num_experts, layer.top_k) for layer in layers}


def _wanted(opened: OpenedModel, asked: _Asked) -> dict[str, Wanted]:
    if asked.trace is None:
        return {layer.path: wanted_evenly(layer.num_experts, layer.top_k) for layer in opened.layers}
    return {layer.path: wanted for layer, wanted in zip(opened.layers, wanted_in(asked.trace), strict=True)}


def _unreadable(opened: OpenedModel, outline: Outline) -> str | None:
    """Why the experts of these files cannot be streamed as they lie, if so."""
    try:
        locate_experts(opened.model, opened.modules, opened.checkpoint)
    except (UnsupportedModelError, CheckpointError) as error:
        return str(error).replace(str(outline.folder), outline.name)
    return None


def _surely_too_much(context: int, opened: OpenedModel, target: Target, experts: int | float | str) -> str | None:
    """Why this context cannot fit, whatever prefill takes: what that takes is slow to find out. None where it may."""
    least = expert_budget(experts, opened.layers, auto_bytes=sum(layer.floor_bytes for layer in opened.layers))
    kv_bytes = opened.kv.of(context)
    need = opened.trunk_bytes + kv_bytes + least + POOL_BYTES
    if need <= target.budget_bytes:
        return None
    what = "one token's experts" if experts == "auto" else f"experts={experts!r}"
    return (
        f"Trunk ({format_bytes(opened.trunk_bytes)}), KV cache ({format_bytes(kv_bytes)}) and {what} "
        f"({format_bytes(least)}) alone need {format_bytes(need, up=True)}, and an engine gets "
        f"{format_bytes(target.budget_bytes)}."
    )


def _does_not_fit(context: int, why: str) -> ContextPlan:
    return ContextPlan(context, "does not fit", None, None, None, None, None, None, why)


def _row(
    context: int, division: Plan, work: Workload, curves: Mapping[str, HitCurve], rates: Rates | None
) -> ContextPlan:
    speed, full_speed, first = None, None, None
    if rates is not None:
        speed = 1 / decode_s(work.step(division, curves, 1), rates)
        full_speed = 1 / decode_s(work.step(division, curves, context), rates)
        first = prefill_s(work.prompt(division, context - 1), rates)
    resident = division.bank_bytes == division.expert_bytes
    verdict: Verdict = "resident" if resident else "streams"
    if speed is not None and speed < TOO_SLOW_TOKENS_PER_S:
        verdict = "too slow"
    return ContextPlan(
        context=context,
        verdict=verdict,
        plan=division,
        expert_share=division.bank_bytes / division.expert_bytes if division.expert_bytes else None,
        hit_rate=work.hit_rate(division, curves),
        tokens_per_s=speed,
        full_tokens_per_s=full_speed,
        first_token_s=first,
    )


def _assumptions(outline: Outline, opened: OpenedModel, target: Target, asked: _Asked) -> Iterator[str]:
    yield {
        "files": "sizes of the weights are those of the files",
        "headers": "sizes of the weights are those of the hub's files, by their headers",
        "config": "sizes of the weights are predicted from the config alone, "
        + (f"in {asked.bits} bits as mlx_lm.convert -q writes them" if asked.bits else _described(opened)),
    }[outline.weights]
    yield from target.assumptions
    yield (
        "prefill is as MLX computes here on the CPU, with all attention scores in memory: a GPU may take less"
        if target.rates is not None
        else "prefill is as MLX computes on the CPU"
    )
    if opened.layers and asked.hits is None and asked.trace is not None:
        yield f"hits are those of an LRU that replays the trace of {asked.trace.tokens} tokens"
    elif opened.layers and asked.hits is None:
        yield "hits are a guess by top-k, from a few replayed texts; your texts may differ by several points"
    elif opened.layers:
        yield "hits are by the curve that was given"
    if target.rates is not None:
        rates = target.rates
        yield (
            f"decode: {rates.efficiency:.0%} of the bandwidth, {rates.layer_s * 1e3:.1f} ms a layer, "
            f"{rates.sync_s * 1e3:.1f} ms a layer that streams, {rates.miss_s * 1e3:.1f} ms a missed expert and the "
            f"time to read it"
        )
        yield f"first token: of a prompt that fills the context, at {rates.prefill_efficiency:.0%} of the GPU's rate"


def _described(opened: OpenedModel) -> str:
    said = opened.config.get("quantization")
    if isinstance(said, dict):
        return f"quantised as it says ({said.get('bits')} bits, {said.get('mode', 'affine')})"
    return "not quantised, as it says; bits=4 predicts for mlx_lm.convert -q"


def _warnings(lengths: Sequence[int], bound: int | None, opened: OpenedModel) -> Iterator[str]:
    beyond = [context for context in lengths if bound is not None and context > bound]
    if beyond:
        yield (
            f"{', '.join(map(str, beyond))} tokens are more than the {bound} that the model was made for: it was "
            f"never trained on positions beyond them, and what it writes there loses the thread. It would run, and "
            f"take the memory said."
        )
    settings = opened.kv_choice.settings
    if settings.window is not None:
        yield f"window={settings.window} is lossy: each token attends to a part of the text only."
    if settings.kv_bits is not None:
        yield f"kv_bits={settings.kv_bits} is lossy: keys and values are rounded."
