"""What a trace says of a model's routing: hits at every cache size, load balance, reuse. Knows NumPy only.

The hit rates are those of an LRU cache for each layer, at every capacity from one pass over the trace: an expert
asked for is a hit in each cache that is larger than its stack distance, the number of other experts of its layer that
were asked for since it last was (R. L. Mattson, J. Gecsei, D. R. Slutz, I. L. Traiger, "Evaluation techniques for
storage hierarchies", IBM Systems Journal 9(2), 1970). The cache is cold before the first token, and each token is a
call of its own, as in decode: a prefill chunk, which reads each expert once, does better.

Legend: T tokens, L layers, K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxmoe.experts.trace import NO_EXPERT, Trace

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """One layer's routing. `layer`: the model's number of it, or the trace's column where that is not known.

    `shares[e]`: of the uses that went to expert `e`. `share_std`: their standard deviation; 0 is perfect balance.
    `dead_experts`: never asked for. `longest_burst`: most tokens in a row that asked for one expert, `burst_expert`.
    `reuse_tokens`: median number of tokens since the expert asked for was last asked for, None where none came again.
    `reused_next`, `reused_within_8`: share of uses of an expert that the token before, or one of the 8 before, used.
    `hit_rates[n]`: share of uses that hit with `n` slots, from 0 to all experts. `lookahead_recall`: share of the
    experts asked for that the layer's router names when it is given the hidden state of the MoE layer before (the
    guess that lookahead reads by); None where it was not measured.
    """

    layer: int
    num_experts: int
    shares: tuple[float, ...]
    share_std: float
    dead_experts: tuple[int, ...]
    longest_burst: int
    burst_expert: int
    reuse_tokens: float | None
    reused_next: float
    reused_within_8: float
    hit_rates: tuple[float, ...]
    lookahead_recall: float | None = None


@dataclass(frozen=True, slots=True)
class RoutingStats:
    """A trace in numbers. `hit_rates[n]`: of all layers with `n` slots each, or all their experts if they have fewer.

    `top_k`: experts that one token needs at once; the engine never has fewer slots.
    """

    tokens: int
    top_k: int
    hit_rates: tuple[float, ...]
    layers: tuple[LayerRouting, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def routing_stats(trace: Trace, lookahead_recall: Mapping[int, float] | None = None) -> RoutingStats:
    """Everything at once. `lookahead_recall`: of each layer, by its number in the model, where it was measured.

    Raises ValueError for a trace of no token.
    """
    experts = unique_uses(trace.experts)
    if not (experts != NO_EXPERT).any():
        raise ValueError("The trace holds no token that asked for an expert.")
    most = max(trace.num_experts)
    distances, gaps = stack_distances(experts, most), reuse_gaps(experts, most)
    hits = np.stack([_hits(distances[:, column], most) for column in range(len(trace.num_experts))])
    uses = (experts != NO_EXPERT).sum(axis=(0, 2))
    recall = lookahead_recall or {}
    layers = []
    for column, num_experts in enumerate(trace.num_experts):
        number = column if trace.layers is None else trace.layers[column]
        counts = _counts(experts[:, column], num_experts)
        shares = counts / max(1, uses[column])
        burst, expert = longest_burst(experts[:, column], num_experts)
        gap = gaps[:, column]
        again = gap[gap > 0]
        layers.append(
            LayerRouting(
                layer=number,
                num_experts=num_experts,
                shares=tuple(shares.tolist()),
                share_std=float(shares.std()),
                dead_experts=tuple(np.flatnonzero(counts == 0).tolist()),
                longest_burst=burst,
                burst_expert=expert,
                reuse_tokens=float(np.median(again)) if len(again) else None,
                reused_next=_share((gap == 1).sum(), uses[column]),
                reused_within_8=_share(((gap > 0) & (gap <= 8)).sum(), uses[column]),
                hit_rates=tuple(_share(n, uses[column]) for n in hits[column, : num_experts + 1]),
                lookahead_recall=recall.get(number),
            )
        )
    together = tuple(_share(n, uses.sum()) for n in hits.sum(axis=0))
    return RoutingStats(trace.tokens, trace.top_k, together, tuple(layers))


def unique_uses(experts: npt.NDArray[np.uint16]) -> Ints:
    """`experts [T, L, K]` with an expert that one token names twice named once, at its last place: it is one use."""
    uses = experts.astype(np.int64)
    top_k = uses.shape[2]
    for first in range(top_k - 1):
        again = (uses[:, :, first, None] == uses[:, :, first + 1 :]).any(axis=2)
        uses[again, first] = NO_EXPERT
    return uses


def stack_distances(experts: Ints, num_experts: int) -> Ints:
    """For each use of `experts [T, L, K]` its LRU stack distance at the start of its token's call.

    `num_experts` where the expert was never used before (a miss at every capacity), and where there is none.
    """
    tokens, columns, _ = experts.shape
    cold = num_experts
    # depth[l, e]: experts of layer l used more recently than e. The last column stands for NO_EXPERT.
    depth = np.full((columns, num_experts + 1), cold)
    layer = np.arange(columns)[:, None]
    distances = np.full(experts.shape, cold)
    for token in range(tokens):
        asked = np.where(experts[token] == NO_EXPERT, num_experts, experts[token])
        present = asked < num_experts
        before = depth[layer, asked]
        distances[token] = before
        # An expert goes down by one for each that comes from below it to the top.
        passed_by = np.where(present, before, -1)
        depth += (passed_by[:, :, None] > depth[:, None, :]).sum(axis=1)
        depth[layer, asked] = present[:, ::-1].cumsum(axis=1)[:, ::-1] - 1  # the last one asked for is on top
        depth[:, num_experts] = cold
    return distances


def reuse_gaps(experts: Ints, num_experts: int) -> Ints:
    """For each use of `experts [T, L, K]` how many tokens ago its expert was last used; 0 where it was not."""
    tokens, columns, _ = experts.shape
    last = np.full((columns, num_experts + 1), -1)
    layer = np.arange(columns)[:, None]
    gaps = np.zeros(experts.shape, np.int64)
    for token in range(tokens):
        asked = np.where(experts[token] == NO_EXPERT, num_experts, experts[token])
        before = last[layer, asked]
        gaps[token] = np.where(before >= 0, token - before, 0)
        last[layer, asked] = token
        last[:, num_experts] = -1
    return gaps


def longest_burst(experts: Ints, num_experts: int) -> tuple[int, int]:
    """Of one layer's `experts [T, K]`: the most tokens in a row that asked for the same expert, and that expert."""
    run, longest = np.zeros(num_experts, np.int64), np.zeros(num_experts, np.int64)
    for asked in experts:
        here = asked[asked != NO_EXPERT]
        goes_on = run[here] + 1
        run[:] = 0
        run[here] = goes_on
        longest[here] = np.maximum(longest[here], goes_on)
    return int(longest.max()), int(longest.argmax())


def _counts(experts: Ints, num_experts: int) -> Ints:
    return np.bincount(experts[experts != NO_EXPERT], minlength=num_experts)


def _hits(distances: Ints, most: int) -> Ints:
    """Hits at each capacity from 0 to `most`: the uses whose distance is smaller."""
    counts = np.bincount(distances.ravel(), minlength=most + 1)[:most]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _share(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else 0.0
