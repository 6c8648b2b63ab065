"""Hit rates of eviction policies on recorded routing: `compare_eviction.py FOLDER`.

FOLDER holds traces: `.npz` with `experts` (uint16, `[tokens, moe_layers, top_k]`) and `num_experts`. Every layer has
the same number of slots, empty at first; a call is one token, cut into waves as a bank does it. The product's policy
is the class that runs. `--tuned` names the traces that its parameters were chosen on; the others are held out.
`--prefill N` hands over the first N tokens as one chunk and counts after it. `--sweep` compares LRFU's parameters.
`--layers`: slots by each layer's own hit curve, as the product divides them, beside the same share of every layer.

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
from mlxmoe.experts.routing import routing_stats
from mlxmoe.experts.trace import Trace as RecordedTrace
from mlxmoe.memory.experts import MoeLayer, slots_by_hits

SHARES = {"1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2, "3/4": 3 / 4}


@dataclass(frozen=True)
class Trace:
    """Recorded routing. `layers[l]`: for each token the experts it wanted of that layer."""

    name: str
    num_experts: int
    layers: Sequence[Tokens]

    @property
    def model(self) -> str:
        """The name without the number of the text."""
        stem, _, number = self.name.rpartition("-")
        return stem if number.isdigit() else self.name

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
        found = steps(traces, [""], partial(compare_layers, traces=traces))
        show_layers([row for rows in found for row in rows])
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

LAYER_SHARES = {"1/4": 1 / 4, "3/8": 3 / 8, "1/2": 1 / 2, "5/8": 5 / 8, "3/4": 3 / 4, "7/8": 7 / 8}


@dataclass(frozen=True)
class LayersRow:
    """Hit rates with as many slots: the same share of every layer, and divided by curves.

    `kind`: whose curves: of a trace's first half, judged on its second; or of the model's other traces.
    """

    trace: str
    kind: str
    share: str
    equal: float
    by_curves: float


def compare_layers(trace: Trace, _: str, *, traces: Sequence[Trace]) -> list[LayersRow]:
    """One row for each share of the experts and kind of curves."""
    tokens = len(trace.layers[0])
    half = tokens // 2
    others = [other for other in traces if other is not trace and other.model == trace.model]
    kinds = {"first half": (hit_rates(trace, half), half)}
    if others:
        kinds["other texts"] = (np.mean([hit_rates(other) for other in others], axis=0).tolist(), 0)
    replayed: dict[tuple[int, int], list[int]] = {}

    def rate(slots: Sequence[int], start: int) -> float:
        hits = 0
        for place in enumerate(slots):
            if place not in replayed:
                replayed[place] = replay(POLICIES[CHOSEN], trace.layers[place[0]], place[1])
            hits += sum(replayed[place][start:])
        return hits / (trace.top_k * (tokens - start) * len(slots))

    rows = []
    for share, part in LAYER_SHARES.items():
        equal = [max(trace.top_k, int(trace.num_experts * part))] * len(trace.layers)
        for kind, (curves, start) in kinds.items():
            layers = [
                MoeLayer(str(number), trace.num_experts, trace.top_k, 1, tuple(curve))
                for number, curve in enumerate(curves)
            ]
            by_curves = slots_by_hits(sum(equal), layers)
            rates = rate(equal, start), rate([by_curves[layer.path] for layer in layers], start)
            rows.append(LayersRow(trace.name, kind, share, *rates))
    return rows


def hit_rates(trace: Trace, tokens: int | None = None) -> list[tuple[float, ...]]:
    """For each layer an LRU's by slots, over the first `tokens` or all, as a kept profile has them."""
    experts = np.array(trace.layers, np.uint16).swapaxes(0, 1)[:tokens]
    recorded = RecordedTrace(experts, (trace.num_experts,) * experts.shape[1])
    return [layer.hit_rates for layer in routing_stats(recorded).layers]


def show_layers(rows: Sequence[LayersRow]) -> None:
    print("| trace | curves of | slots | equal | by curves |\n| --- | --- | --- | ---: | ---: |")
    for row in rows:
        rates = f"{100 * row.equal:.2f} | {100 * row.by_curves:.2f}"
        print(f"| {row.trace} | {row.kind} | {row.share} | {rates} |")
    found = []
    for kind in dict.fromkeys(row.kind for row in rows):
        for share in LAYER_SHARES:
            gains = [row.by_curves - row.equal for row in rows if (row.kind, row.share) == (kind, share)]
            misses = [1 - row.equal for row in rows if (row.kind, row.share) == (kind, share)]
            found.append({"curves": kind, "share": share, "gain": mean(gains), "least": min(gains)})
            found[-1]["of_misses"] = mean(gains) / mean(misses)
    print(json.dumps({"gain": found}))


if __name__ == "__main__":
    main()
