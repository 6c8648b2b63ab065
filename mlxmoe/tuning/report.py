"""What a plan says: a row for each context, one of them recommended, the reasons, and what all of it rests on.

And a row for each number of replies at once, where that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlxmoe.memory.plan import Plan
from mlxmoe.memory.sizes import format_bytes
from mlxmoe.tuning.target import Target

Verdict = Literal["resident", "streams", "too slow", "does not fit"]

TOO_SLOW_TOKENS_PER_S = 2.0  # half of what people read
KEEPS = 0.75  # of the best row's speed that a longer context may cost at most


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """What one context length costs. All figures are predicted; sizes in bytes, None where it does not fit.

    `plan`: the memory as `load(context=)` would divide it. `expert_share`: of the routed experts' bytes, what is in
    slots; `hit_rate`: of the experts that decoded tokens ask for, what is in a slot; both None for a dense model.
    `tokens_per_s`: decoded, at the beginning of a text; `full_tokens_per_s`: with the context full, when every token
    reads the whole KV cache. `first_token_s`: after a prompt that fills the context. All three None where the
    machine's speed is not known. `why`: what stands in the way where it does not fit.
    """

    context: int
    verdict: Verdict
    plan: Plan | None
    expert_share: float | None
    hit_rate: float | None
    tokens_per_s: float | None
    full_tokens_per_s: float | None
    first_token_s: float | None
    why: str | None = None

    @property
    def fits(self) -> bool:
        return self.plan is not None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "plan": None if self.plan is None else self.plan.as_dict()}


@dataclass(frozen=True, slots=True)
class TogetherPlan:
    """What `replies` at once cost, each of them `context` tokens long with its prompt. All figures are predicted.

    `plan`: the memory, with the KV of all of them, None where they do not fit. `expert_share`: of the routed
    experts' bytes, what stays in slots; `hit_rate`: of the distinct experts that a pass wants, what is in a slot;
    both None for a dense model. `tokens_per_s`: of all together at the beginning of their texts; `full_tokens_per_s`
    with every context full; None where the machine's speed is not known. `verdict`: "too slow" where each gets too
    little with its context full. `why`: what stands in the way where they do not fit.
    """

    replies: int
    context: int
    verdict: Verdict
    plan: Plan | None
    expert_share: float | None = None
    hit_rate: float | None = None
    tokens_per_s: float | None = None
    full_tokens_per_s: float | None = None
    why: str | None = None

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def each_tokens_per_s(self) -> float | None:
        """Of one of the replies, with every context full."""
        return None if self.full_tokens_per_s is None else self.full_tokens_per_s / self.replies

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "plan": None if self.plan is None else self.plan.as_dict(),
            "each_tokens_per_s": self.each_tokens_per_s,
        }


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What `mlxmoe.plan` found out. Sizes in bytes.

    `model`: as it was named. `weights`: where the sizes are from: "files" or "headers" (exact), "config" (predicted).
    `params`, `active_params`: of the whole model, and those that one token uses. `trunk_bytes`: must be in memory,
    with `floor_bytes`, one token's experts; the rest of `expert_bytes` may stay on disk. `kv_bytes_per_token`: of the
    caches that grow without bound, averaged over a long text. `model_context`: what the model was made for.
    `recommended`: one of `contexts`, None where none fits. `reasons`: for it, and against the longer ones.
    `assumptions`, `warnings`: sentences. `together`: of each context a row for each number of replies at once that
    was asked for, and `people`: sentences that say how many it serves.
    """

    model: str
    model_type: str
    weights: Literal["files", "headers", "config"]
    params: int
    active_params: int
    trunk_bytes: int
    expert_bytes: int
    floor_bytes: int
    kv_bytes_per_token: int
    model_context: int | None
    target: Target
    contexts: tuple[ContextPlan, ...]
    recommended: ContextPlan | None
    reasons: tuple[str, ...]
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    together: tuple[TogetherPlan, ...] = ()
    people: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        return self.trunk_bytes + self.expert_bytes

    def as_dict(self) -> dict[str, Any]:
        """As plain values. `basis` says of each group of figures whether it is exact, published or predicted."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **plain,
            "weight_bytes": self.weight_bytes,
            "target": self.target.as_dict(),
            "contexts": [row.as_dict() for row in self.contexts],
            "together": [row.as_dict() for row in self.together],
            "recommended": None if self.recommended is None else self.recommended.context,
            "basis": {
                "weights": "predicted" if self.weights == "config" else "exact",
                "target.rates": {
                    "published": "published or assumed: see assumptions",
                    "given": "given by the caller",
                }[self.target.rates_basis],
                "contexts": "predicted",
                "together": "predicted",
                "measured": [],
            },
        }


def recommend(rows: Sequence[ContextPlan]) -> ContextPlan | None:
    """The longest context that costs little: at least KEEPS of the best row's speed, or of its experts in slots.

    Speeds are compared at the beginning of a text: what a longer context takes from the experts is lost from there
    on, while reading a long KV cache is only paid for by who fills it.
    """
    fit = [row for row in rows if row.fits]
    fast = [row for row in fit if row.verdict != "too slow"] or fit
    best = max((_worth(row) for row in fast), default=0.0)
    return max((row for row in fast if _worth(row) >= KEEPS * best), key=lambda row: row.context, default=None)


def explain(rows: Sequence[ContextPlan], chosen: ContextPlan | None) -> Iterator[str]:
    """Why `chosen`, and what the others would cost."""
    if chosen is None:
        yield "No context fits. " + next((row.why for row in rows if row.why), "")
        return
    yield f"{chosen.context} tokens: {_state(chosen)}."
    for row in rows:
        if row.context > chosen.context:
            yield f"{row.context} tokens: {_cost(row, chosen)}."


def _worth(row: ContextPlan) -> float:
    if row.tokens_per_s is not None:
        return row.tokens_per_s
    return 1.0 if row.expert_share is None else row.expert_share


def _speed(row: ContextPlan) -> str:
    return "" if row.tokens_per_s is None else f", {row.tokens_per_s:.1f} tokens/s"


def _state(row: ContextPlan) -> str:
    assert row.plan is not None, "only what fits is recommended"
    kv = f"KV takes {format_bytes(row.plan.kv_bytes)}"
    if row.expert_share is None:
        return f"{kv} beside all weights{_speed(row)}"
    kept = "all experts stay" if row.verdict == "resident" else f"{percent(row.expert_share)} of the experts stay"
    slow = " (slow, and nothing else is faster)" if row.verdict == "too slow" else ""
    return f"{kv} and {kept} in memory{_speed(row)}{slow}"


def _cost(row: ContextPlan, chosen: ContextPlan) -> str:
    if row.plan is None:
        return f"does not fit. {(row.why or '').rstrip('.')}"
    kv = f"KV takes {format_bytes(row.plan.kv_bytes)}"
    if row.expert_share is None:
        return f"{kv}{_speed(row)}"
    left = "none" if row.verdict == "resident" else percent(1 - row.expert_share, up=True)
    drop = "" if row.tokens_per_s is None else f" and decode drops to {row.tokens_per_s:.1f} tokens/s"
    keeps = "" if chosen.expert_share is None else f"; {chosen.context} keeps {percent(chosen.expert_share)}"
    return f"{kv}: {left} of the experts leave memory{drop}{keeps}"


def percent(share: float, *, up: bool = False) -> str:
    """Rounded down, so that only a whole is 100 %; or up."""
    return f"{-int(-share * 100 // 1) if up else int(share * 100 + 1e-9)} %"


def rate_down(tokens_per_s: float) -> str:
    """Rounded down: what is slow does not look fast enough."""
    if tokens_per_s >= 10:
        return f"{int(tokens_per_s)}"
    return f"{int(tokens_per_s * 10) / 10:.1f}" if tokens_per_s >= 1 else f"{int(tokens_per_s * 100) / 100:.2f}"
