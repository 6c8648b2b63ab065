"""Which experts several texts want in one step, and what a cache that they share is worth. Pure arithmetic.

With `p` the share of tokens that ask for an expert, `n` tokens that are drawn independently want

    distinct = sum over experts of 1 - (1 - p) ** n

of a layer's experts: none of them asks for the expert with (1 - p) ** n, and expectations add up, however the
experts of one token hang together (the occupancy problem). Where nothing was recorded every expert is taken to be
asked for as often as the others, `p = top_k / experts`, which is the most that any popularity gives. Eight texts of
gpt-oss-20b, replayed side by side, wanted 3, 9 and 16 % less than that with 2, 4 and 8 at once, and within
1.5 % of what their popularity over all eight gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mlxmoe.errors import PlanError
from mlxmoe.experts.routing import routing_stats
from mlxmoe.experts.trace import Trace
from mlxmoe.memory.experts import MoeLayer
from mlxmoe.tuning.roofline import HitCurve, curve_through

# Texts in one step -> how many experts of a layer they want between them.
Wanted = Callable[[int], float]

# An LRU that `n` texts share hits as one text's does with the share `1 - (1 - share) ** (1 / n ** SPREAD)` in slots.
# 0: all texts want the same; 1: they have nothing in common. Fitted to eight texts of gpt-oss-20b, replayed two, four
# and eight at once: 0.31 to 0.33 with half of the experts in slots, 0.38 to 0.48 with a quarter, 0.16 to 0.21 with
# three quarters.
SPREAD = 1 / 3


def wanted_evenly(num_experts: int, top_k: int) -> Wanted:
    """Every expert asked for as often as the others."""
    return lambda texts: num_experts * (1 - (1 - top_k / num_experts) ** texts)


def wanted_by_popularity(shares: Sequence[float]) -> Wanted:
    """`shares`: of each expert, how many of the tokens ask for it, from 0 to 1."""

    def distinct(texts: int) -> float:
        return sum(1 - (1 - min(share, 1.0)) ** texts for share in shares)

    return distinct


def trace_of(layers: Sequence[MoeLayer], trace: Trace | str | Path) -> Trace:
    """The trace, or that in the file. Raises SavedStateError, and PlanError where it is of another model or empty."""
    found = trace if isinstance(trace, Trace) else Trace.load(trace)
    ours = tuple(layer.num_experts for layer in layers), max((layer.top_k for layer in layers), default=0)
    if (found.num_experts, found.top_k) != ours:
        raise PlanError(
            f"The trace is of {len(found.num_experts)} layers with up to {max(found.num_experts)} experts, "
            f"{found.top_k} a token, but the model has {len(layers)} with up to {max(ours[0], default=0)}, "
            f"{ours[1]} a token. Record this model's: mlxmoe profile MODEL --trace FILE.npz"
        )
    if found.tokens == 0:
        raise PlanError("The trace holds no token. Record some: mlxmoe profile MODEL --trace FILE.npz")
    return found


def wanted_in(trace: Trace) -> list[Wanted]:
    """Of each layer of `trace`: the average over tokens drawn from it at random."""
    return [wanted_by_popularity([asked / trace.tokens for asked in counts]) for counts in trace.counts()]


def hits_in(trace: Trace) -> list[HitCurve]:
    """Of each layer of `trace`: the hits of an LRU that replays it."""
    return [
        curve_through([(slots / layer.num_experts, hits) for slots, hits in enumerate(layer.hit_rates)])
        for layer in routing_stats(trace).layers
    ]


def shared_by(texts: int, hits: HitCurve) -> HitCurve:
    """The hits of a cache that `texts` share, of the distinct experts that they want; `hits`: with one text."""

    def shared(share: float) -> float:
        return hits(1 - (1 - share) ** (texts**-SPREAD)) if 0 < share < 1 else hits(share)

    return shared
