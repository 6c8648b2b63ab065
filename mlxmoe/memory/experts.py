"""The experts' part of a memory budget: how many bytes, and how many slots each layer gets. Pure arithmetic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from mlxmoe.errors import MemoryBudgetError
from mlxmoe.memory.sizes import format_bytes, parse_bytes

# Of all experts' bytes. With less, hit curves of one text say little about another (docs/notebook.md).
CURVES_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """What the plan needs to know of one MoE layer's routed experts.

    `hit_rates[n]`: share of its lookups that hit with `n` slots, from none to one for each expert; empty where nobody
    has measured that.
    """

    path: str
    num_experts: int
    top_k: int
    expert_bytes: int
    hit_rates: tuple[float, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.num_experts * self.expert_bytes

    @property
    def floor_bytes(self) -> int:
        """What one token needs at once."""
        return self.top_k * self.expert_bytes


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
    """Slots of each layer's bank, at least top_k, together within the budget.

    Where each layer's hit rates are known and the budget holds half of all experts or more, the slots are where they
    bring most hits. Else, and for what that leaves over, the same share of every layer.
    """
    total = sum(layer.nbytes for layer in layers)
    if budget_bytes >= CURVES_SHARE * total and all(layer.hit_rates for layer in layers):
        return slots_by_hits(budget_bytes, layers)
    return _equal_shares(budget_bytes, layers, total)


def _equal_shares(budget_bytes: int, layers: Sequence[MoeLayer], total: int) -> dict[str, int]:
    """What rounding leaves over goes to the layers with the smallest share, a slot each first."""
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


class _Rise(NamedTuple):
    """A stretch of a layer's hit curve: `gain`, hits a token for each byte, goes on up to `slots`."""

    gain: float
    layer: MoeLayer
    slots: int


def slots_by_hits(budget_bytes: int, layers: Sequence[MoeLayer]) -> dict[str, int]:
    """Always the stretch with most hits for its bytes; then the layers with the smallest share, slot by slot."""
    slots = {layer.path: layer.top_k for layer in layers}
    room = budget_bytes - sum(layer.floor_bytes for layer in layers)
    rises = sorted((rise for layer in layers for rise in _rises(layer)), key=lambda rise: -rise.gain)
    for _, layer, up_to in rises:
        take = max(0, min(room // layer.expert_bytes, up_to - slots[layer.path]))
        slots[layer.path] += take
        room -= take * layer.expert_bytes
    shares = [(slots[layer.path] / layer.num_experts, number) for number, layer in enumerate(layers)]
    heapify(shares)
    while shares:
        _, number = heappop(shares)
        layer = layers[number]
        if slots[layer.path] < layer.num_experts and layer.expert_bytes <= room:
            slots[layer.path] += 1
            room -= layer.expert_bytes
            heappush(shares, (slots[layer.path] / layer.num_experts, number))
    return slots


def _rises(layer: MoeLayer) -> Iterator[_Rise]:
    """The stretches of the upper hull of the layer's hit curve, the steepest first, as far as it rises.

    Of the hull, so that a flat piece hides no rise behind it.
    """
    hull: list[tuple[int, float]] = []
    for point in enumerate(layer.hit_rates[layer.top_k :], layer.top_k):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    for low, high in pairwise(hull):
        if (slope := _slope(low, high)) > 0:
            yield _Rise(slope * layer.top_k / layer.expert_bytes, layer, high[0])


def _slope(low: tuple[int, float], high: tuple[int, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])


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
