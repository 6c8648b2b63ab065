"""What a tuning says: measured beside predicted, one configuration recommended, the reasons. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlxmoe.kv.settings import KVSettings
from mlxmoe.memory.plan import Plan
from mlxmoe.memory.sizes import format_bytes
from mlxmoe.tuned import TunedMachine
from mlxmoe.tuning.report import KEEPS, TOO_SLOW_TOKENS_PER_S, percent
from mlxmoe.tuning.roofline import Rates

Goal = Literal["speed", "context", "balanced"]
GOALS: tuple[Goal, ...] = ("speed", "context", "balanced")

NOISE = 0.03  # of a rate: less than this is taken for chance


@dataclass(frozen=True, slots=True)
class TuneRow:
    """One configuration. `plan`: how it divides the memory. `expert_share`: of the experts' bytes, what has a slot.

    `full_tokens_per_s`: measured, decoded with the context full; 0 where pressure stopped it before a token.
    `tokens`: that were measured. `hit_rate`: measured, None without experts that stream. `predicted_tokens_per_s`: by
    the model of speed with the report's `rates`. `first_token_s`: predicted, of a prompt that fills the context; None
    where no prefill was measured. `pressure`: what the memory guard said, if that stopped it: then it is no choice.
    `overrun`: why there was no time for it, if it was left out.
    """

    context: int
    plan: Plan
    expert_share: float | None
    full_tokens_per_s: float
    tokens: int
    hit_rate: float | None
    predicted_tokens_per_s: float | None
    first_token_s: float | None
    pressure: str | None
    overrun: str | None = None

    @property
    def usable(self) -> bool:
        return self.pressure is None and self.full_tokens_per_s > 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "plan": self.plan.as_dict()}


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A prompt of one chunk, measured."""

    chunk_tokens: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What `mlxmoe.tune` found out. Sizes in bytes. `model`: as it was named, None for the built-in demo model.

    `budget_bytes`: what an engine could take of the machine. `rows`, `prefill`: measured. `rates`: the constants that
    the rows come to; None where nothing could be measured. `sync_s`: of a host sync, measured by itself: a streaming
    layer takes no less. `read_bytes_per_s`: of the model's own files, measured; None where the model is too small to
    tell, and `read_cold` says whether it is known to be the disk's.
    `recommended`: one of `rows`, None where none meets the goal. `experts`, `context`, `chunk_tokens`: what it comes
    to as arguments of `load`, each None where what fits is best, and `context` where longer ones were not reached.
    `ended`: "complete", "time" (the budget was used up), "interrupted" (Ctrl-C). `saved`: the file that later loads
    use. `notes`: sentences on how to read it.
    """

    model: str | None
    model_type: str
    machine: TunedMachine
    kv: KVSettings
    budget_bytes: int
    goal: Goal
    min_tokens_per_s: float | None
    rows: tuple[TuneRow, ...]
    prefill: tuple[PrefillRow, ...]
    rates: Rates | None
    sync_s: float
    read_bytes_per_s: float | None
    read_cold: bool
    recommended: TuneRow | None
    experts: int | None
    context: int | None
    chunk_tokens: int | None
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    ended: Literal["complete", "time", "interrupted"]
    seconds: float
    saved: str | None

    @property
    def arguments(self) -> dict[str, int]:
        """What is recommended, as arguments of `load`, lossy ones that were asked for included."""
        kv = self.kv
        lossy = {"window": kv.window, "sinks": kv.sinks if kv.window is not None else None, "kv_bits": kv.kv_bits}
        said = {"context": self.context, "experts": self.experts, "chunk_tokens": self.chunk_tokens, **lossy}
        return {name: value for name, value in said.items() if value is not None}

    @property
    def load_line(self) -> str:
        """The recommendation as one would write it in Python."""
        model = [] if self.model is None else [repr(self.model)]
        return f"load({', '.join([*model, *(f'{name}={value}' for name, value in self.arguments.items())])})"

    @property
    def flags(self) -> str:
        """The recommendation as one would write it on the command line."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.arguments.items())

    def as_dict(self) -> dict[str, Any]:
        """As plain values. `basis` says of each figure whether it is measured or predicted."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **plain,
            "machine": asdict(self.machine),
            "kv": asdict(self.kv),
            "rows": [row.as_dict() for row in self.rows],
            "prefill": [asdict(row) for row in self.prefill],
            "rates": None if self.rates is None else asdict(self.rates),
            "recommended": None if self.recommended is None else self.rows.index(self.recommended),
            "load_line": self.load_line,
            "flags": self.flags,
            "basis": {
                "measured": ["full_tokens_per_s", "hit_rate", "prefill", "read_bytes_per_s", "sync_s"],
                "fitted to the measured rows": ["rates"],
                "predicted": ["predicted_tokens_per_s", "first_token_s", "plan"],
            },
        }


def choose(rows: Sequence[TuneRow], goal: Goal, least: float | None) -> TuneRow | None:
    """The row that meets the goal best; None where none is at least `least` tokens/s.

    Of each context the fastest, and among equals the one with the most slots. `speed`: the fastest, and among equals
    the longest. `context`: the longest that is not too slow, or that keeps `least`. `balanced`: the longest that
    keeps KEEPS of the fastest's speed.
    """
    best = [_best_of(rows, context) for context in sorted({row.context for row in rows if row.usable})]
    enough = [row for row in best if least is None or row.full_tokens_per_s >= least]
    if not enough:
        return None
    top = max(row.full_tokens_per_s for row in enough)
    match goal:
        case "speed":
            floor = (1 - NOISE) * top
        case "context":
            floor = least if least is not None else min(TOO_SLOW_TOKENS_PER_S, top)
        case "balanced":
            floor = KEEPS * top
    return max((row for row in enough if row.full_tokens_per_s >= floor), key=lambda row: row.context)


def is_most(row: TuneRow, rows: Sequence[TuneRow]) -> bool:
    """Whether nothing seen of the same context has more slots: then what fits is best, and none need be named."""
    seen = [other for other in rows if other.context == row.context and other.overrun is None]
    return all(other.plan.bank_bytes <= row.plan.bank_bytes for other in seen)


def pareto(rows: Sequence[TuneRow]) -> list[TuneRow]:
    """Rows to which no other is superior in context and speed at once, by context."""
    front: list[TuneRow] = []
    for row in sorted((r for r in rows if r.usable), key=lambda r: (-r.context, -r.full_tokens_per_s)):
        if not front or row.full_tokens_per_s > front[-1].full_tokens_per_s:
            front.append(row)
    return front[::-1]


def explain(rows: Sequence[TuneRow], chosen: TuneRow | None, least: float | None) -> Iterator[str]:
    """Why `chosen`, and what the others would cost; all of it measured."""
    usable = [row for row in rows if row.usable]
    for row in rows:
        if row.pressure is not None:
            yield f"{_name(row)} was stopped: {row.pressure}"
    yield from _left_out(rows)
    if chosen is None:
        if usable:
            top = max(usable, key=lambda row: row.full_tokens_per_s)
            yield (
                f"No configuration keeps {least} tokens/s: the fastest, {_name(top)}, decodes "
                f"{top.full_tokens_per_s:.2f}. Ask for less with --min-tps, or see what a smaller model gives."
            )
        return
    same = [row for row in usable if row.context == chosen.context]
    larger = [row for row in same if row.plan.bank_bytes > chosen.plan.bank_bytes]
    if larger:
        slow = min(larger, key=lambda row: row.full_tokens_per_s)
        yield (
            f"More slots are slower here: {_name(slow)} decodes {slow.full_tokens_per_s:.2f} tokens/s. The page "
            f"cache that feeds misses may have too little."
        )
    for context in sorted({row.context for row in usable} - {chosen.context}):
        row = _best_of(rows, context)
        change = row.full_tokens_per_s / chosen.full_tokens_per_s - 1
        yield f"{_name(row)} decodes {row.full_tokens_per_s:.2f} tokens/s, {change:+.0%}."


def _left_out(rows: Sequence[TuneRow]) -> Iterator[str]:
    """Why there was no time for rows: of contexts of which nothing was seen one by one, the most slots of each."""
    left, seen = [row for row in rows if row.overrun is not None], {r.context for r in rows if r.overrun is None}
    for context in sorted({row.context for row in left} - seen):
        row = max((row for row in left if row.context == context), key=lambda row: row.plan.bank_bytes)
        yield f"{_name(row)} was not measured: {row.overrun}. Give it a longer budget, or a shorter context"
    if others := [_name(row) for row in left if row.context in seen]:
        yield f"There was no time left for {'; '.join(others)}"


def _best_of(rows: Sequence[TuneRow], context: int) -> TuneRow:
    same = [row for row in rows if row.context == context and row.usable]
    top = max(row.full_tokens_per_s for row in same)
    equal = [row for row in same if row.full_tokens_per_s >= (1 - NOISE) * top]
    return max(equal, key=lambda row: row.plan.bank_bytes)


def _name(row: TuneRow) -> str:
    if row.expert_share is None:
        return f"context {row.context}"
    experts = f"{percent(row.expert_share)} of the experts ({format_bytes(row.plan.bank_bytes)})"
    return f"context {row.context} with {experts}"
