"""Hit rates of eviction policies on recorded routing: `compare_eviction.py FOLDER`.

FOLDER holds traces: `.npz` with `experts` (uint16, `[tokens, moe_layers, top_k]`) and `num_experts`. Every layer has
the same number of slots, empty at first; a call is one token, cut into waves as a bank does it. The product's policy
is the class that runs. `--tuned` names the traces that its parameters were chosen on; the others are held out.
`--prefill N` hands over the first N tokens as one chunk and counts after it. `--sweep` compares LRFU's parameters.
`--layers`: slots by each layer's own hit curve, taken from a trace's first half and judged on its second.

Prints tables and then one line of JSON. Rates are hits of all experts that tokens asked for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean
from typing import TypeVar

import numpy as np
from eviction_policies import BASE, BOUND, CHOSEN, POLICIES, SWEEP, Make, Tokens
from rich.console import Console
from rich.progress import Progress

from mlxmoe.experts.policy import plan_waves

SHARES = {"1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2, "3/4": 3 / 4}


@dataclass(frozen=True)
class Trace:
    """Recorded routing. `layers[l]`: for each token the experts it wanted of that layer."""

    name: str
    num_experts: int
    layers: Sequence[Tokens]

    @property
    def top_k(self) -> int:
        return len(self.layers[0][0])

    def slots(self, share: float) -> int:
        """Of each layer, for this share of its experts; never fewer than one token wants."""
        return max(self.top_k, int(self.num_experts * share))


@dataclass(frozen=True)
class Row:
    """One trace at one share of the experts: for each policy its hits. `first`: misses that no policy avoids."""

    trace: str
    share: str
    slots: int
    wanted: int
    first: int
    hits: Mapping[str, int]

    def rate(self, policy: str) -> float:
        return self.hits[policy] / self.wanted

    def warm_rate(self, policy: str) -> float:
        """Without the first time that each expert was wanted."""
        return self.hits[policy] / max(1, self.wanted - self.first)


R = TypeVar("R")


def main(command: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tuned", nargs="*", default=[], metavar="TRACE", help="traces the parameters come from")
    parser.add_argument("--prefill", type=int, default=0, metavar="TOKENS", help="these come first, as one chunk")
    parser.add_argument("--sweep", action="store_true", help="compare LRFU's parameters")
    parser.add_argument("--layers", action="store_true", help="compare equal slots with slots by hit curves")
    arguments = parser.parse_args(command)
    traces = [read_trace(file) for file in sorted(arguments.folder.glob("*.npz"))]
    if not traces:
        parser.error(f"no .npz in {arguments.folder}")
    if unknown := set(arguments.tuned) - {trace.name for trace in traces}:
        parser.error(f"--tuned names traces that are not in the folder: {', '.join(sorted(unknown))}")
    if arguments.layers:
        show_layers([row for rows in steps(traces, [""], compare_layers) for row in rows])
        return
    policies = {BASE: POLICIES[BASE], **SWEEP, BOUND: POLICIES[BOUND]} if arguments.sweep else POLICIES
    rows = list(steps(traces, list(SHARES), partial(compare, policies=policies, prefill=arguments.prefill)))
    show(rows, list(policies), arguments.tuned)


def steps(traces: Sequence[Trace], shares: Sequence[str], measure: Callable[[Trace, str], R]) -> Iterator[R]:
    """What `measure` finds for each trace and share, with a bar on stderr."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(traces) * len(shares))
        for trace in traces:
            for share in shares:
                progress.update(task, description=f"{trace.name} {share}")
                yield measure(trace, share)
                progress.advance(task)


def read_trace(file: Path) -> Trace:
    with np.load(file) as stored:
        experts = stored["experts"]
        return Trace(file.stem, int(stored["num_experts"]), experts.swapaxes(0, 1).tolist())


def replay(make: Make, tokens: Tokens, slots: int, prefill: int = 0) -> list[int]:
    """Hits of each token after the first `prefill`, which come as one chunk; the bank is empty at first."""
    policy, free = make(slots, tokens), slots
    chunks = [tokens[:prefill]] if prefill else []
    hits = []
    for chunk in [*chunks, *([token] for token in tokens[prefill:])]:
        experts = [expert for token in chunk for expert in token]
        policy.count(experts, len(chunk[0]))
        last_use = dict(zip(experts, count()))
        hits.append(sum(expert in policy for expert in last_use))
        needed = set(last_use)
        for wave in plan_waves(last_use, policy, (), slots):
            missing = sum(expert not in policy for expert in wave)
            if missing > free:
                policy.evict(missing - free, needed)
            free = max(0, free - missing)
            policy.touch(wave)
            if len(last_use) > slots:
                needed.difference_update(wave)
    return hits[len(chunks) :]


# --- policies ---------------------------------------------------------------------------------------------


def compare(trace: Trace, share: str, *, policies: Mapping[str, Make], prefill: int) -> Row:
    slots = trace.slots(SHARES[share])
    hits = {
        name: sum(sum(replay(make, layer, slots, prefill)) for layer in trace.layers)
        for name, make in policies.items()
    }
    first = sum(
        len(
            {expert for token in layer for expert in token}
            - {expert for token in layer[:prefill] for expert in token}
        )
        for layer in trace.layers
    )
    wanted = sum(len(token) for layer in trace.layers for token in layer[prefill:])
    return Row(trace.name, share, slots, wanted, first, hits)


def show(rows: Sequence[Row], policies: Sequence[str], tuned: Sequence[str]) -> None:
    """Hit rates, what they come to for each policy, and the JSON."""
    print(f"| trace | slots | {' | '.join(policies)} |\n| --- | ---: |{' ---: |' * len(policies)}")
    for row in rows:
        rates = " | ".join(f"{100 * row.rate(policy):.2f}" for policy in policies)
        print(f"| {row.trace} | {row.share}: {row.slots} | {rates} |")
    held_out = [row for row in rows if row.trace not in tuned]
    found = {policy: summary(policy, rows, held_out) for policy in policies}
    print("\n| policy | mean % | without first misses | below the bound | held out | least beside LRU |")
    print("| --- |" + " ---: |" * 5)
    for policy, values in found.items():
        print(f"| {policy} | {' | '.join(f'{100 * value:.2f}' for value in values.values())} |")
    chosen = min((policy for policy in policies if policy != BOUND), key=lambda policy: found[policy]["gap"])
    never_worse = {policy: found[policy]["least_beside_lru"] >= 0 for policy in policies}
    if CHOSEN in found:
        below = "" if never_worse[CHOSEN] else "NOT "
        print(f"\n{CHOSEN} is {below}at least LRU on every trace at every capacity; ", end="")
        gap, base = 100 * found[CHOSEN]["gap"], 100 * found[BASE]["gap"]
        print(f"its mean gap to {BOUND} is {gap:.2f} points, LRU's {base:.2f}")
    listed = [
        {"trace": row.trace, "share": row.share, "slots": row.slots, "rates": {p: row.rate(p) for p in policies}}
        for row in rows
    ]
    print(json.dumps({"rows": listed, "policies": found, "closest": chosen, "at_least_lru": never_worse}))


def summary(policy: str, rows: Sequence[Row], held_out: Sequence[Row]) -> dict[str, float]:
    """Means over traces and shares; `gap` and `held_out_gap` are to the bound."""

    def gap(rows: Sequence[Row]) -> float:
        return mean(row.rate(BOUND) - row.rate(policy) for row in rows) if rows else 0.0

    return {
        "rate": mean(row.rate(policy) for row in rows),
        "warm_rate": mean(row.warm_rate(policy) for row in rows),
        "gap": gap(rows),
        "held_out_gap": gap(held_out),
        "least_beside_lru": min(row.rate(policy) - row.rate(BASE) for row in rows),
    }


# --- slots of each layer ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayersRow:
    """Hit rates in a trace's second half: equal slots, slots by the first half's curves, by the second's own."""

    trace: str
    share: str
    equal: float
    by_first_half: float
    by_second_half: float


def compare_layers(trace: Trace, _: str) -> list[LayersRow]:
    """One row for each share of the experts."""
    half, step = len(trace.layers[0]) // 2, max(1, trace.num_experts // 32)
    equals = {share: trace.slots(part) for share, part in SHARES.items()}
    sizes = sorted({*equals.values(), *range(trace.top_k, trace.num_experts + 1, step)})
    hits = [{size: replay(POLICIES[CHOSEN], layer, size) for size in sizes} for layer in trace.layers]
    first = [{size: sum(found[:half]) for size, found in curve.items()} for curve in hits]
    second = [{size: sum(found[half:]) for size, found in curve.items()} for curve in hits]
    wanted = trace.top_k * (len(trace.layers[0]) - half) * len(trace.layers)

    def rate(slots: Sequence[int]) -> float:
        return sum(curve[size] for curve, size in zip(second, slots, strict=True)) / wanted

    rows = []
    for share, equal in equals.items():
        budget = equal * len(trace.layers)
        rates = [
            rate(slots) for slots in ([equal] * len(trace.layers), divide(first, budget), divide(second, budget))
        ]
        rows.append(LayersRow(trace.name, share, *rates))
    return rows


def divide(curves: Sequence[Mapping[int, int]], budget: int) -> list[int]:
    """Slots of each layer, at most `budget` in all: always the step that brings most hits for a slot.

    `curves[l]`: slots -> hits. A step may go over several sizes, so that a flat piece hides no rise behind it.
    """
    slots = [min(curve) for curve in curves]
    left = budget - sum(slots)
    while True:
        steps = [
            ((curve[size] - curve[slots[layer]]) / (size - slots[layer]), layer, size)
            for layer, curve in enumerate(curves)
            for size in curve
            if 0 < size - slots[layer] <= left
        ]
        if not steps:
            return slots
        _, layer, size = max(steps, key=lambda step: (step[0], -step[2]))
        left -= size - slots[layer]
        slots[layer] = size


def show_layers(rows: Sequence[LayersRow]) -> None:
    print("| trace | slots | equal | by the first half | by the second half |\n| --- | --- | ---: | ---: | ---: |")
    for row in rows:
        rates = (row.equal, row.by_first_half, row.by_second_half)
        print(f"| {row.trace} | {row.share} | {' | '.join(f'{100 * rate:.2f}' for rate in rates)} |")
    gains = {
        share: {
            "held_out": mean(row.by_first_half - row.equal for row in rows if row.share == share),
            "in_sample": mean(row.by_second_half - row.equal for row in rows if row.share == share),
            "least": min(row.by_first_half - row.equal for row in rows if row.share == share),
        }
        for share in SHARES
    }
    print(json.dumps({"gain": gains}))


if __name__ == "__main__":
    main()
