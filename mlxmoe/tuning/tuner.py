"""tune(): a model loaded on this machine, measured at several contexts and expert budgets, and what is best kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxmoe.dividing import PrefillRoom, divide_memory
from mlxmoe.doctor.machine import Machine
from mlxmoe.doctor.read_rate import ReadRate, measure_read_rate
from mlxmoe.durations import parse_duration
from mlxmoe.errors import MemoryBudgetError, RequestError, SavedStateError
from mlxmoe.hub import Progress, resolve
from mlxmoe.identity import FolderIdentity
from mlxmoe.kv.settings import KVSettings
from mlxmoe.memory.guard import MemoryEvent
from mlxmoe.memory.plan import Plan
from mlxmoe.memory.reading import MemoryReader, usable_bytes
from mlxmoe.memory.sizes import parse_bytes, parse_tokens
from mlxmoe.opening import OpenedModel, open_folder
from mlxmoe.starting import load
from mlxmoe.tuned import Tuning, TuningFolder, this_machine
from mlxmoe.tuning.bench import MOST_TOKENS
from mlxmoe.tuning.planning import CONTEXTS
from mlxmoe.tuning.rows import predicted_rows
from mlxmoe.tuning.run import Run, TuneProgress
from mlxmoe.tuning.search import Point
from mlxmoe.tuning.tuned_report import GOALS, Goal, PrefillRow, TuneReport, TuneRow, choose, explain, is_most
from mlxmoe.tuning.workload import Workload

LEAST_BUDGET_S = 5.0
READ_SHARE = 0.05  # of the whole time, for the read rate
CHUNK_GAIN = 0.1  # by which a smaller chunk must be faster than mlx-lm's own to be recommended


def tune(
    model: str | Path | None = None,
    *,
    goal: Goal | None = None,
    min_tps: float | None = None,
    budget: float | str = "5m",
    contexts: Sequence[int | str] | None = None,
    memory: int | str | None = None,
    window: int | None = None,
    sinks: int = 4,
    kv_bits: int | None = None,
    save: bool = True,
    progress: TuneProgress | None = None,
    load_progress: Progress | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> TuneReport:
    """Measure which context and which expert budget suit a model on this machine, and keep that for later loads.

    - `model`, `memory`, `window`, `sinks`, `kv_bits`, `revision`, `trust_remote_code`: as for `load`.
    - `goal`: "speed" (the fastest), "context" (the longest that is not too slow) or "balanced" (the longest that
      keeps three quarters of the fastest's speed). `min_tps`: the longest context that keeps so many tokens/s;
      together with a goal, what that may choose from.
    - `budget`: for measuring, seconds or "5m"; loading is not in it. What would not be over by then is not begun: it
      is a row without figures, which says why it was left out.
    - `contexts`: tokens, or "32k"; by default some up to the model's own.
    - `save`: in a file of the user's cache folder, which `load` of this model on this machine looks for.
    - `progress(done_s, total_s, what)`: called before each measurement. `load_progress`: as `progress` of `load`.

    Ctrl-C ends the measuring and keeps what was measured; where that is nothing, KeyboardInterrupt is raised. A
    configuration that brings memory pressure is stopped. Raises RequestError for what makes no sense, and what `load`
    raises.
    """
    chosen_goal, budget_s = _checked(goal, min_tps, budget)
    settings = KVSettings(window, sinks, kv_bits)
    lengths = None if contexts is None else sorted({parse_tokens(context) for context in contexts})
    if lengths == []:
        raise RequestError("No context was named. Leave contexts out, or name at least one.")
    reading = MemoryReader().read()
    memory_bytes = usable_bytes(reading) if memory is None else parse_bytes(memory, "memory")
    folder = resolve(model, revision, load_progress)
    opened = open_folder(folder, kv_settings=settings, trust_remote_code=trust_remote_code)
    points, notes = _points(opened, lengths, memory_bytes)
    rate = _read_rate(opened, budget_s)
    events: list[MemoryEvent] = []
    engine = load(
        folder, memory=memory_bytes, context=max(points, key=lambda p: p.plan.bank_bytes).context, window=window,
        sinks=sinks, kv_bits=kv_bits, tuned=False, on_memory=events.append, progress=load_progress,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    read_s, read_per_s = (0.0, None) if rate is None else (rate.seconds, rate.bytes_per_s)
    with engine:
        run = Run(engine, opened, points, events, budget_s, progress, read_per_s, read_s)
        run.measure()
    work = Workload.of(opened)
    rows, rates = predicted_rows(work, run.search.rows, run.prefill, run.sync_s)
    best = choose(rows, chosen_goal, min_tps)
    longer = [] if best is None else unmeasured(points, rows, best)
    report = TuneReport(
        model=None if model is None else str(model),
        model_type=opened.config["model_type"],
        machine=this_machine(reading),
        kv=settings,
        budget_bytes=memory_bytes,
        goal=chosen_goal,
        min_tokens_per_s=min_tps,
        rows=rows,
        prefill=tuple(run.prefill),
        rates=rates,
        sync_s=run.sync_s,
        read_bytes_per_s=read_per_s,
        read_cold=rate is not None and rate.cold,
        recommended=best,
        experts=None if best is None or is_most(best, rows) else best.plan.bank_bytes,
        context=None if best is None or longer else best.context,
        chunk_tokens=_better_chunk(run.prefill, best.plan) if best else None,
        reasons=tuple(explain(rows, best, min_tps)),
        notes=(*notes, *_too_early(longer), *_notes(run, opened, sum(row.tokens > 0 for row in rows), budget_s)),
        ended=run.ended,
        seconds=run.seconds,
        saved=None,
    )
    return _saved(report, folder) if save and best is not None else report


def forget(model: str | Path | None = None, revision: str | None = None) -> int:
    """Remove what `tune` kept of a model that is on this machine; how many files there were."""
    return TuningFolder().forget(resolve(model, revision, download=False))


def _checked(goal: Goal | None, min_tps: float | None, budget: float | str) -> tuple[Goal, float]:
    if goal is not None and goal not in GOALS:
        raise RequestError(f"goal={goal!r} is not offered: {', '.join(GOALS)}.")
    if min_tps is not None and not (isinstance(min_tps, int | float) and 0 < min_tps < float("inf")):
        raise RequestError(f"min_tps={min_tps!r} is no speed: tokens a second, more than 0.")
    budget_s = parse_duration(budget, "budget")
    if not LEAST_BUDGET_S <= budget_s < float("inf"):
        raise RequestError(
            f"budget={budget!r} is too short to measure anything by, or no time: at least {LEAST_BUDGET_S:.0f}s."
        )
    return goal or ("balanced" if min_tps is None else "context"), budget_s


def _points(opened: OpenedModel, lengths: list[int] | None, memory_bytes: int) -> tuple[list[Point], list[str]]:
    """For each context that fits, with the most slots; and why others do not. Raises MemoryBudgetError for none."""
    points, notes = [], []
    bound = None if opened.kv_choice.endless else opened.model_context
    refused = None
    with PrefillRoom(opened) as room:
        for context in _default_contexts(bound) if lengths is None else lengths:
            try:
                plan = divide_memory(opened, room, experts="auto", memory_bytes=memory_bytes, context=context)
            except MemoryBudgetError as error:
                refused = error
                notes.append(f"context {context} does not fit: {error}")
            else:
                points.append(Point(context, plan))
    if not points:
        raise refused or MemoryBudgetError("No context fits.")
    return points, notes


def _default_contexts(bound: int | None) -> list[int]:
    """Those of a plan within what the model was made for; of a small one, parts of that."""
    if bound is None or bound > CONTEXTS[0]:
        return [context for context in CONTEXTS if bound is None or context < bound] + ([bound] if bound else [])
    return sorted({max(2, bound // part) for part in (4, 2, 1)})


def _read_rate(opened: OpenedModel, budget_s: float) -> ReadRate | None:
    if not opened.layers:
        return None
    try:
        return measure_read_rate(opened.checkpoint, Machine().bytes_from_disk, min(2.0, READ_SHARE * budget_s))
    except OSError:  # the load that follows says what is wrong with the files
        return None


def _better_chunk(prefill: Sequence[PrefillRow], plan: Plan) -> int | None:
    """The chunk that is faster than the plan's own, by more than chance; None where there is none."""
    own = next((row for row in prefill if row.chunk_tokens == plan.chunk_tokens), None)
    best = max(prefill, key=lambda row: row.tokens_per_s, default=None)
    if own is None or best is None or best.tokens_per_s < (1 + CHUNK_GAIN) * own.tokens_per_s:
        return None
    return best.chunk_tokens


def unmeasured(points: Sequence[Point], rows: Sequence[TuneRow], best: TuneRow) -> list[int]:
    """The contexts that fit, are longer than the best measured one, and of which nothing was seen."""
    tried = {row.context for row in rows if row.overrun is None}
    return [point.context for point in points if point.context > best.context and point.context not in tried]


def _too_early(longer: Sequence[int]) -> Iterator[str]:
    if longer:
        yield (
            f"no context is named: {', '.join(map(str, longer))} were not reached, and may be fast enough. A longer "
            f"budget, or fewer contexts, would tell"
        )


def _notes(run: Run, opened: OpenedModel, rows: int, budget_s: float) -> Iterator[str]:
    if run.ended != "complete":
        why = "Ctrl-C" if run.ended == "interrupted" else f"The budget of {budget_s:.0f} s"
        measured = f"after {rows} configuration{'' if rows == 1 else 's'}, which {'is' if rows == 1 else 'are'} kept"
        yield f"{why} ended the measuring {measured if rows else 'before there was any'}: others may be better"
    yield (
        f"measured: decoding at the end of a full context (its last {MOST_TOKENS} tokens, or its last quarter), "
        f"filled with the same few words over and over; what is decoded is English and code, Python's own help"
    )
    if not opened.layers:
        yield "the model is dense: it has no experts to give slots to"
    yield (
        "predicted: from the experts that were counted as read, by constants that are fitted to these very rows: how "
        "near they come says whether the model of speed holds here, not how well it foresees"
    )
    if run.prefill:
        yield "the first token is predicted from the fastest measured prompt of one chunk"
    else:
        yield "no prompt of a whole chunk was measured: it would have taken too much of the time"


def _saved(report: TuneReport, folder: Path) -> TuneReport:
    """With what is recommended kept, or with a note why it cannot be: minutes of measuring are not to be lost."""
    identity, best = FolderIdentity(folder, None).now(), report.recommended
    assert best is not None, "only what is recommended is kept"
    said: dict[str, Any] = {name: getattr(report, name) for name in ("experts", "context", "chunk_tokens")}
    tuning = Tuning(
        model=identity.name, digest=identity.digest, mlx_lm=identity.mlx_lm, machine=report.machine, kv=report.kv,
        goal=report.goal, tokens_per_s=best.full_tokens_per_s, **said,
    )  # fmt: skip
    try:
        return replace(report, saved=str(TuningFolder().keep(tuning, folder)))
    except SavedStateError as error:
        return replace(report, notes=(f"nothing was kept for later loads: {error}", *report.notes))
