"""Several replies at once: what their KV caches leave of the experts, how fast, and so how many people. Predicted.

Knows what `mlxmoe serve` does, but runs nothing: the KV of all replies is taken from the room for experts, as a
batch's lease takes it, and a pass gives every reply a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mlxmoe.errors import PlanError
from mlxmoe.memory.experts import divide_slots
from mlxmoe.memory.plan import KV_STEP, Plan
from mlxmoe.memory.sizes import format_bytes
from mlxmoe.tuning.report import TOO_SLOW_TOKENS_PER_S, ContextPlan, TogetherPlan, Verdict, percent, rate_down
from mlxmoe.tuning.roofline import HitCurve, Rates, decode_s
from mlxmoe.tuning.wanted import Wanted, shared_by
from mlxmoe.tuning.workload import Workload

SERVING_CONTEXT = 8192  # tokens of a conversation, where none is named
MOST_REPLIES = 1024
MOST_TRIED = 64  # one after the other, for how many people it serves
READING_TOKENS_PER_S = 2 * TOO_SLOW_TOKENS_PER_S  # what people read
GAIN = 0.03  # more tokens per second of all, from which on `mlxmoe serve` computes more replies at once


def parse_replies(counts: Sequence[int | str]) -> list[int]:
    """`(1, "4", 8)` as numbers of replies, from the least. Raises PlanError for what is none."""
    found = set()
    for count in counts:
        number = str(count).strip() if not isinstance(count, bool) else ""
        if not (number.isascii() and number.isdigit() and len(number) <= 9 and 1 <= int(number) <= MOST_REPLIES):
            raise PlanError(
                f"together={count!r} is no number of replies at once: from 1 to {MOST_REPLIES}, for example 1,2,4,8."
            )
        found.add(int(number))
    if not found:
        raise PlanError("No number of replies was named. Leave together out, or name at least one, for example 4.")
    return sorted(found)


@dataclass(frozen=True)
class Sharing:
    """What the replies share. `hits`, `wanted`: of each layer's path, with one text and for any number of them.

    `in_one_pass`: whether a pass computes all replies, else each has its own. `unreadable`: why experts cannot be on
    disk, None if they can.
    """

    work: Workload
    hits: Mapping[str, HitCurve]
    wanted: Mapping[str, Wanted]
    rates: Rates | None
    in_one_pass: bool
    unreadable: str | None = None

    def row(self, alone: ContextPlan, replies: int) -> TogetherPlan:
        """As many `replies` as `alone` is one."""
        if alone.plan is None:
            return TogetherPlan(replies, alone.context, "does not fit", None, why=alone.why)
        plan = self._divided(alone.plan, replies)
        if isinstance(plan, str):
            return TogetherPlan(replies, alone.context, "does not fit", None, why=plan)
        passed = replies if self.in_one_pass else 1
        hits = {path: shared_by(replies, curve) for path, curve in self.hits.items()}
        distinct = self.work.distinct(self.wanted, passed)
        first, full = (
            None
            if self.rates is None
            else passed / decode_s(self.work.step_of(plan, hits, tokens, distinct, passed), self.rates)
            for tokens in (1, alone.context)
        )
        verdict: Verdict = "resident" if plan.bank_bytes == plan.expert_bytes else "streams"
        if full is not None and full / replies < TOO_SLOW_TOKENS_PER_S:
            verdict = "too slow"
        return TogetherPlan(
            replies=replies,
            context=alone.context,
            verdict=verdict,
            plan=plan,
            expert_share=plan.bank_bytes / plan.expert_bytes if plan.expert_bytes else None,
            hit_rate=self.work.hit_rate_of(plan, hits, distinct),
            tokens_per_s=first,
            full_tokens_per_s=full,
        )

    def _divided(self, alone: Plan, replies: int) -> Plan | str:
        """The memory with the caches of all `replies`, which take from the slots; or why they do not fit.

        In a batch every cache is as long as the longest may become, and one step more.
        """
        layers, kv = self.work.opened.layers, self.work.opened.kv
        kv_bytes = replies * kv.of((alone.context or 1) + (KV_STEP if replies > 1 else 0))
        fixed = alone.total_bytes - alone.bank_bytes - alone.kv_bytes
        room = alone.memory_bytes - fixed - kv_bytes
        least = alone.bank_bytes if self.unreadable else self.work.floor_bytes
        if room < least:
            return (
                f"KV for {replies} replies of {alone.context} tokens takes {format_bytes(kv_bytes, up=True)}: with "
                f"{format_bytes(fixed)} for trunk and prefill and {format_bytes(least)} for the experts that must "
                f"stay they need {format_bytes(fixed + kv_bytes + least, up=True)}, and an engine gets "
                f"{format_bytes(alone.memory_bytes)}." + (f" {self.unreadable}" if self.unreadable else "")
            )
        if room >= alone.bank_bytes:
            return replace(alone, kv_bytes=kv_bytes)
        slots = divide_slots(room, layers)
        bank_bytes = sum(slots[layer.path] * layer.expert_bytes for layer in layers)
        return replace(alone, kv_bytes=kv_bytes, bank_bytes=bank_bytes, slots=slots)

    def assumptions(self, counted: bool) -> Iterator[str]:
        """What the rows rest on. `counted`: whether the experts wanted are by a trace."""
        yield (
            "replies at once all have the length of the context, and no prompt is read meanwhile; a person is one "
            "reply under way: who reads or thinks takes no part"
        )
        if not self.in_one_pass:
            yield "replies of this model type are computed in turns, each in passes of its own"
        elif self.work.opened.layers:
            evenly = (
                "experts x (1 - (1 - top-k / experts) ** n), as if each reply drew its own; real texts agree more "
                "and want less"
            )
            yield (
                "a pass for n replies reads the trunk once, n KV caches, and each expert that is wanted once: "
                f"{'of n tokens drawn at random from the trace' if counted else evenly}"
            )
        if self.work.opened.layers:
            yield (
                "n replies share the slots and hit as one does with 1 - (1 - share) ** (1 / n ** (1/3)) of the "
                "experts in slots: a guess, from eight replayed texts; experts that a layer misses at once cost as "
                "much as one by one"
            )


def people(sharing: Sharing, alone: Sequence[ContextPlan], replies: Sequence[int]) -> Iterator[str]:
    """How many people are served, for each context of `alone`, and what larger numbers of `replies` would cost."""
    for one in alone if replies else ():
        chosen = _served(sharing, one, min(max(replies), MOST_TRIED))
        if chosen.plan is None:
            yield f"Serves nobody with {one.context} tokens. {chosen.why or ''}".rstrip()
            continue
        each = " each" if chosen.replies > 1 else ""
        yield f"Serves {_count(chosen.replies)} with {one.context} tokens{each}: {_state(chosen)}."
        for more in replies:
            if more > chosen.replies:
                yield f"{more} at {one.context}: {_cost(sharing.row(one, more), chosen)}."


def _served(sharing: Sharing, alone: ContextPlan, most: int) -> TogetherPlan:
    """One reply, and another as long as `mlxmoe serve` would add it: all fit, and are faster together than before.

    And as long as each comes as fast as it is read. Where no speed is known, as many as fit.
    """
    served = sharing.row(alone, 1)
    for replies in range(2, most + 1):
        row = sharing.row(alone, replies)
        if not row.fits or not _gains(row, served) or (row.each_tokens_per_s or math.inf) < READING_TOKENS_PER_S:
            break
        served = row
    return served


def _gains(row: TogetherPlan, fewer: TogetherPlan) -> bool:
    total, before = row.full_tokens_per_s, fewer.full_tokens_per_s
    return total is None or before is None or total >= before * (1 + GAIN)


def _count(replies: int) -> str:
    if replies == 1:
        return "1 person"
    return f"{replies} people at once" + (" or more" if replies == MOST_TRIED else "")


def _speed(row: TogetherPlan) -> str:
    total, each = row.full_tokens_per_s, row.each_tokens_per_s
    if total is None or each is None:
        return ""
    return f", {rate_down(each)} tokens/s" + ("" if row.replies == 1 else f" each, {rate_down(total)} together")


def _state(row: TogetherPlan) -> str:
    assert row.plan is not None, "only what fits is served"
    kv = f"KV takes {format_bytes(row.plan.kv_bytes)}"
    if row.expert_share is None:
        return f"{kv} beside all weights{_speed(row)}"
    whole = row.plan.bank_bytes == row.plan.expert_bytes
    kept = "all experts stay" if whole else f"{percent(row.expert_share)} of the experts stay"
    each = row.each_tokens_per_s
    slow = " (slower than people read)" if each is not None and each < READING_TOKENS_PER_S else ""
    return f"{kv} and {kept} in memory{_speed(row)}{slow}"


def _cost(row: TogetherPlan, chosen: TogetherPlan) -> str:
    if row.plan is None:
        return f"does not fit. {(row.why or '').rstrip('.')}"
    kv = f"KV takes {format_bytes(row.plan.kv_bytes)}"
    left = (
        "" if row.expert_share in (None, 1.0) else f", {percent(1 - (row.expert_share or 0), up=True)} of the experts"
    )
    left = f"{left} are not in memory" if left else ""
    wait = "" if _gains(row, chosen) else "; fewer at once are as fast together, so the server lets some wait"
    return f"{kv}{left}{_speed(row)}{wait}"
