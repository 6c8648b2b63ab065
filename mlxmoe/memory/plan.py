"""One memory budget divided: trunk, expert slots, KV, prefill. Pure arithmetic; reads no model and no machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlxmoe.errors import MemoryBudgetError
from mlxmoe.memory.sizes import format_bytes, parse_bytes

KV_STEP = 256  # tokens by which mlx-lm's caches grow


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """What the plan needs to know of one MoE layer's routed experts."""

    path: str
    num_experts: int
    top_k: int
    expert_bytes: int

    @property
    def nbytes(self) -> int:
        return self.num_experts * self.expert_bytes

    @property
    def floor_bytes(self) -> int:
        """What one token needs at once."""
        return self.top_k * self.expert_bytes


@dataclass(frozen=True, slots=True)
class KVBytes:
    """What a KV cache takes: `fixed_bytes` whatever its length, `step_bytes` for every 256 tokens.

    `windows`: for caches that stop growing, the steps and bytes of each: `(most_steps, step_bytes)`. `rows`: for
    caches that grow in such steps up to a window of any length, their tokens and the bytes of one:
    `(most_tokens, token_bytes)`; they are counted whole where no length is known.
    """

    fixed_bytes: int = 0
    step_bytes: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    rows: tuple[tuple[int, int], ...] = ()

    def of(self, tokens: int | None) -> int:
        """Bytes for `tokens`; for the first step where no length is known."""
        steps = -(-(tokens or 1) // KV_STEP)
        windows = sum(min(steps, most) * step_bytes for most, step_bytes in self.windows)
        rows = sum(
            (most if tokens is None else min(steps * KV_STEP, most)) * token_bytes for most, token_bytes in self.rows
        )
        return self.fixed_bytes + steps * self.step_bytes + windows + rows

    def tokens_in(self, nbytes: int) -> int:
        """The most tokens, in whole steps, whose cache takes at most `nbytes`."""
        low, high = 0, 2**24
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.of(middle * KV_STEP) <= nbytes else (low, middle - 1)
        return low * KV_STEP


@dataclass(frozen=True, slots=True)
class Plan:
    """How the memory is divided; all in bytes except `context` and `slots`.

    `trunk_bytes`: weights that are no routed experts. `expert_bytes`: all routed experts, wherever they are.
    `bank_bytes`: what of them has a slot. `kv_bytes`: KV cache of `context` tokens. `prefill_bytes`: room for a
    prefill chunk's activations. `memory_bytes`: the budget that was divided. `context`: tokens, prompt and reply,
    or None where neither the model nor the user sets a bound. `model_context`: what the model was
    made for. `slots`: slots of each MoE layer by its path; a layer with all its experts is resident.
    """

    trunk_bytes: int
    expert_bytes: int
    bank_bytes: int
    kv_bytes: int
    prefill_bytes: int
    memory_bytes: int
    context: int | None
    model_context: int | None
    slots: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return self.trunk_bytes + self.bank_bytes + self.kv_bytes + self.prefill_bytes

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total_bytes": self.total_bytes}


def expert_budget(experts: int | float | str, layers: Sequence[MoeLayer], auto_bytes: int) -> int:
    """The bytes that `experts=` grants the banks, at most all experts.

    `experts`: `"auto"` (then `auto_bytes`), `"all"`, bytes, `"12GB"`, or a share (`0.25`, `"25%"`) of the experts'
    bytes. Raises MemoryBudgetError for anything else and for less than one token's need.
    """
    total = sum(layer.nbytes for layer in layers)
    floor = sum(layer.floor_bytes for layer in layers)
    match experts:
        case "auto":
            budget = auto_bytes
        case "all":
            budget = total
        case float() | str() if (share := _share(experts)) is not None:
            if not 0 < share <= 1:
                raise MemoryBudgetError(f"experts={experts!r} is no share: above 0 and at most 1, or 100%.")
            budget = round(share * total)
        case int() | str():
            budget = parse_bytes(experts, "experts")
        case _:
            raise MemoryBudgetError(
                f"experts={experts!r} is not an expert budget. Write 'auto', 'all', bytes, '12GB' or a share, '25%'."
            )
    if budget < floor:
        top_ks = sorted({layer.top_k for layer in layers})
        need = "-".join(str(k) for k in {top_ks[0]: 0, top_ks[-1]: 0})
        raise MemoryBudgetError(
            f"Expert budget is {format_bytes(budget)}, but one token needs {format_bytes(floor)} "
            f"({need} experts x {len(layers)} layers). Raise experts= to {floor} bytes or "
            f"{_percent_up(floor, total)}% or more."
        )
    return min(budget, total)


def divide_slots(budget_bytes: int, layers: Sequence[MoeLayer]) -> dict[str, int]:
    """Slots of each layer's bank: the same share of every layer, at least top_k, together within the budget.

    What rounding leaves over goes to the layers with the smallest share, a slot each first.
    """
    total = sum(layer.nbytes for layer in layers)
    slots = {
        layer.path: min(layer.num_experts, max(layer.top_k, budget_bytes * layer.num_experts // total))
        for layer in layers
    }
    room = budget_bytes - sum(slots[layer.path] * layer.expert_bytes for layer in layers)
    by_share = sorted(layers, key=lambda layer: slots[layer.path] / layer.num_experts)
    for layer in reversed(by_share):  # where floors took more than their share, the largest banks give it back
        give = max(0, min(-(room // layer.expert_bytes), slots[layer.path] - layer.top_k))
        slots[layer.path] -= give
        room += give * layer.expert_bytes
    for most in (1, max(layer.num_experts for layer in layers)):
        for layer in by_share:
            take = min(most, room // layer.expert_bytes, layer.num_experts - slots[layer.path])
            slots[layer.path] += take
            room -= take * layer.expert_bytes
    return slots


def make_plan(
    layers: Sequence[MoeLayer],
    *,
    trunk_bytes: int,
    kv: KVBytes,
    prefill_bytes: int,
    context: int | None,
    model_context: int | None,
    experts: int | float | str,
    memory_bytes: int,
) -> Plan:
    """Divide `memory_bytes` between the parts. Raises MemoryBudgetError where they do not fit, with the numbers.

    `context`: tokens that must fit, None for `model_context` or as much of it as fits. `kv`: what the cache of a
    context takes.
    """
    total = sum(layer.nbytes for layer in layers)
    floor = sum(layer.floor_bytes for layer in layers)
    least = expert_budget(experts, layers, auto_bytes=floor) if layers else 0
    if context is None:
        context = _fitting_context(model_context, kv, memory_bytes - trunk_bytes - prefill_bytes, least, total)
    kv_bytes = kv.of(context)
    fixed = trunk_bytes + kv_bytes + prefill_bytes
    if fixed + least > memory_bytes:
        what = "one token's experts" if experts == "auto" else f"experts={experts!r}"
        raise MemoryBudgetError(
            f"The memory budget is {format_bytes(memory_bytes)}, but {format_bytes(trunk_bytes)} trunk, "
            f"{format_bytes(kv_bytes)} KV cache for {context or 'any'} tokens, {format_bytes(prefill_bytes)} for "
            f"prefill and {format_bytes(least)} for {what} need {format_bytes(fixed + least)}. Lower experts= or "
            f"context=, raise memory= if the machine has more to give, or take a smaller model."
        )
    budget = expert_budget(experts, layers, auto_bytes=memory_bytes - fixed) if layers else 0
    slots = divide_slots(budget, layers) if budget < total else {m.path: m.num_experts for m in layers}
    return Plan(
        trunk_bytes=trunk_bytes,
        expert_bytes=total,
        bank_bytes=sum(slots[layer.path] * layer.expert_bytes for layer in layers),
        kv_bytes=kv_bytes,
        prefill_bytes=prefill_bytes,
        memory_bytes=memory_bytes,
        context=context,
        model_context=model_context,
        slots=slots,
    )


def _fitting_context(model_context: int | None, kv: KVBytes, room: int, least: int, total: int) -> int | None:
    """The model's own context if it fits beside all experts; else what fits a quarter of the room beside the least.

    `room`: bytes for experts and KV; `least`, `total`: bytes of the experts that must and that could be in memory.
    """
    if model_context is None or kv.of(model_context) <= max(room - total, (room - least) // 4):
        return model_context
    fitting = kv.tokens_in(max(0, room - least) // 4)
    return max(min(fitting, model_context), min(KV_STEP, model_context))


def _share(experts: float | str) -> float | None:
    """`0.25`, `"0.25"` or `"25%"` as a fraction; None where it is no share at all."""
    if isinstance(experts, float):
        return experts
    percent = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", experts)
    if percent:
        return float(percent[1]) / 100
    return float(experts) if re.fullmatch(r"\s*0?\.[0-9]+\s*", experts) else None


def _percent_up(part: int, whole: int) -> int:
    return -(-100 * part // whole)
