"""What the product's eviction is compared with: other policies behind its interface, and the bound.

Each is made for `slots` slots and one layer's tokens, of which only Belady's looks ahead. Knows nothing of traces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from mlxmoe.experts.policy import LRFU

Tokens = Sequence[Sequence[int]]  # for each token the experts it wants of one layer


class Policy(Protocol):
    """The product's interface, as a bank uses it: `count` begins a call, `evict` makes room, `touch` admits."""

    def __contains__(self, expert: object) -> bool: ...
    def count(self, experts: Sequence[int], top_k: int) -> None: ...
    def touch(self, experts: Iterable[int]) -> None: ...
    def evict(self, count: int, keep: Container[int]) -> list[int]: ...


Make = Callable[[int, Tokens], Policy]


class Ranked:
    """Who has a slot, by a `worth` that a subclass gives; the least goes first, of equals the least recently used."""

    def __init__(self, slots: int, tokens: Tokens) -> None:
        self.held: dict[int, None] = {}
        self.seen = 0  # tokens

    def __contains__(self, expert: object) -> bool:
        return expert in self.held

    def count(self, experts: Sequence[int], top_k: int) -> None:
        for start in range(0, len(experts), top_k):
            self.see(experts[start : start + top_k])
            self.seen += 1

    def touch(self, experts: Iterable[int]) -> None:
        for expert in experts:
            self.held.pop(expert, None)
            self.held[expert] = None

    def evict(self, count: int, keep: Container[int]) -> list[int]:
        victims = sorted((e for e in self.held if e not in keep), key=self.worths().__getitem__)[:count]
        assert len(victims) == count, "a wave never wants more experts than there are slots"
        for expert in victims:
            del self.held[expert]
        return victims

    def see(self, experts: Sequence[int]) -> None:
        """Take note of the experts of one token."""

    def worths(self) -> Mapping[int, float | tuple[int, ...]]:
        raise NotImplementedError


class LRU(Ranked):
    """Least recently used; within a token the router's order."""

    def worths(self) -> Mapping[int, float | tuple[int, ...]]:
        return dict.fromkeys(self.held, 0.0)


class LRUByFrequency(Ranked):
    """Least recently used; of those that the same token used last, the one used less often so far."""

    def __init__(self, slots: int, tokens: Tokens) -> None:
        super().__init__(slots, tokens)
        self.last_and_uses: defaultdict[int, tuple[int, ...]] = defaultdict(lambda: (0, 0))

    def see(self, experts: Sequence[int]) -> None:
        for expert in experts:
            self.last_and_uses[expert] = (self.seen, self.last_and_uses[expert][1] + 1)

    def worths(self) -> Mapping[int, float | tuple[int, ...]]:
        return self.last_and_uses


class LFU(Ranked):
    """Least frequently used; all counts, also of experts in no slot, are halved every `period` tokens."""

    def __init__(self, slots: int, tokens: Tokens, period: int) -> None:
        super().__init__(slots, tokens)
        self.period = period
        self.uses: defaultdict[int, float] = defaultdict(float)

    def see(self, experts: Sequence[int]) -> None:
        if self.seen % self.period == self.period - 1:
            for expert in self.uses:
                self.uses[expert] /= 2
        for expert in experts:
            self.uses[expert] += 1

    def worths(self) -> Mapping[int, float | tuple[int, ...]]:
        return self.uses


class Successors(Ranked):
    """LRFU's values mixed with who followed this token's experts so far: a first-order chain for each layer.

    P(next | expert) is estimated from counts with `prior` tokens' worth of the values; `share` of it is mixed in.
    """

    def __init__(self, slots: int, tokens: Tokens, share: float = 0.6, prior: float = 8) -> None:
        super().__init__(slots, tokens)
        self.share, self.prior = share, prior
        experts = 1 + max(expert for wanted in tokens for expert in wanted)
        self.values = np.zeros(experts)
        self.followed = np.zeros((experts, experts))
        self.uses = np.zeros(experts)
        self.last: list[int] = []

    def see(self, experts: Sequence[int]) -> None:
        now = list(experts)
        self.followed[np.ix_(self.last, now)] += 1
        self.uses[self.last] += 1
        self.values *= 2 ** (-1 / min(32.0, max(1.0, (self.seen + 1) / 12)))
        self.values[now] += 1
        self.last = now

    def worths(self) -> Mapping[int, float | tuple[int, ...]]:
        values = self.values / self.values.sum()
        prior = self.prior * len(self.last) * values
        chances = (self.followed[self.last] + prior) / (self.uses[self.last] + self.prior)[:, None]
        mixed = (1 - self.share) * values + self.share * chances.sum(0) / len(self.last) ** 2
        return dict(enumerate(mixed.tolist()))


class Belady(Ranked):
    """The bound: whoever is wanted again the latest goes first (Belady, IBM Systems Journal 5(2), 1966)."""

    def __init__(self, slots: int, tokens: Tokens) -> None:
        super().__init__(slots, tokens)
        self.uses: defaultdict[int, list[int]] = defaultdict(list)
        for number, wanted in enumerate(tokens):
            for expert in wanted:
                self.uses[expert].append(number)

    def worths(self) -> Mapping[int, float | tuple[int, ...]]:
        worths = {}
        for expert in self.held:
            uses = self.uses[expert]
            following = bisect_left(uses, self.seen)
            worths[expert] = -float(uses[following]) if following < len(uses) else float("-inf")
        return worths


class S3FIFO:
    """Three FIFO queues: newcomers, the proven, and the names of newcomers that went (Yang et al., SOSP 2023).

    A tenth of the slots is for newcomers. An expert that the call at hand wants is passed over, and only that is not
    in the paper: there one object is asked for at a time.
    """

    def __init__(self, slots: int, tokens: Tokens) -> None:
        self.small_slots = max(1, slots // 10)
        self.ghosts = slots - self.small_slots
        self.small: OrderedDict[int, int] = OrderedDict()  # expert -> uses since it came, 3 at most; the oldest first
        self.main: OrderedDict[int, int] = OrderedDict()
        self.ghost: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, expert: object) -> bool:
        return expert in self.small or expert in self.main

    def count(self, experts: Sequence[int], top_k: int) -> None:
        for expert in experts:
            for queue in (self.small, self.main):
                if expert in queue:
                    queue[expert] = min(3, queue[expert] + 1)

    def touch(self, experts: Iterable[int]) -> None:
        for expert in experts:
            if expert in self:
                continue
            if expert in self.ghost:
                del self.ghost[expert]
                self.main[expert] = 0
            else:
                self.small[expert] = 0

    def evict(self, count: int, keep: Container[int]) -> list[int]:
        return [self.evict_one(keep) for _ in range(count)]

    def evict_one(self, keep: Container[int]) -> int:
        while True:
            small = next((e for e in self.small if e not in keep), None)
            main = next((e for e in self.main if e not in keep), None)
            assert small is not None or main is not None, "a wave never wants more experts than there are slots"
            if small is not None and (len(self.small) >= self.small_slots or main is None):
                if self.small.pop(small) <= 1:
                    self.ghost[small] = None
                    while len(self.ghost) > self.ghosts:
                        self.ghost.popitem(last=False)
                    return small
                self.main[small] = 0
            elif main is not None:
                uses = self.main.pop(main)
                if not uses:
                    return main
                self.main[main] = uses - 1


class ARC:
    """Recent and frequent experts in two LRU lists whose shares learn from those that went too early.

    Megiddo & Modha, FAST 2003. The share learns when a call begins, and an expert that the call wants is passed over.
    """

    def __init__(self, slots: int, tokens: Tokens) -> None:
        self.slots = slots
        self.recent_slots = 0.0  # the target, p in the paper
        self.recent, self.frequent, self.recent_gone, self.frequent_gone = (
            OrderedDict[int, None](),
            OrderedDict[int, None](),
            OrderedDict[int, None](),
            OrderedDict[int, None](),
        )

    def __contains__(self, expert: object) -> bool:
        return expert in self.recent or expert in self.frequent

    def count(self, experts: Sequence[int], top_k: int) -> None:
        for expert in dict.fromkeys(experts):
            if expert in self.recent_gone:
                step = max(1.0, len(self.frequent_gone) / len(self.recent_gone))
                self.recent_slots = min(float(self.slots), self.recent_slots + step)
            elif expert in self.frequent_gone:
                step = max(1.0, len(self.recent_gone) / len(self.frequent_gone))
                self.recent_slots = max(0.0, self.recent_slots - step)

    def touch(self, experts: Iterable[int]) -> None:
        for expert in experts:
            known = False
            for queue in (self.recent, self.frequent, self.recent_gone, self.frequent_gone):
                if expert in queue:
                    del queue[expert]
                    known = True
            (self.frequent if known else self.recent)[expert] = None
        while self.recent_gone and len(self.recent) + len(self.recent_gone) > self.slots:
            self.recent_gone.popitem(last=False)
        while self.frequent_gone and self.total() > 2 * self.slots:
            self.frequent_gone.popitem(last=False)

    def total(self) -> int:
        return len(self.recent) + len(self.frequent) + len(self.recent_gone) + len(self.frequent_gone)

    def evict(self, count: int, keep: Container[int]) -> list[int]:
        victims = []
        for _ in range(count):
            queues = [(self.recent, self.recent_gone), (self.frequent, self.frequent_gone)]
            if len(self.recent) <= self.recent_slots:
                queues.reverse()
            victim, queue, gone = next((e, queue, gone) for queue, gone in queues for e in queue if e not in keep)
            del queue[victim]
            gone[victim] = None
            victims.append(victim)
        return victims


def lrfu(half_life: float, parts: int, slots: int, tokens: Tokens) -> Policy:
    """The product's class; with `parts` 0 the half life is whole from the first token on."""
    return LRFU(half_life, 1 / parts if parts else float("inf"))


BOUND, BASE, CHOSEN = "Belady", "LRU", "LRFU"
POLICIES: dict[str, Make] = {
    BASE: LRU,
    "LRU, frequency": LRUByFrequency,
    "LFU": lambda slots, tokens: LFU(slots, tokens, 2**62),
    "LFU, halved": lambda slots, tokens: LFU(slots, tokens, 48),
    "S3-FIFO": S3FIFO,
    "ARC": ARC,
    CHOSEN: lambda slots, tokens: LRFU(),  # the product's own, with the product's defaults
    "successors": Successors,
    BOUND: Belady,
}
SWEEP: dict[str, Make] = {  # by half life in tokens and the first share
    f"LRFU({half_life}, 1/{parts})" if parts else f"LRFU({half_life})": partial(lrfu, half_life, parts)
    for half_life in (8, 16, 32, 64)
    for parts in (0, 2, 4, 8, 12, 16)
}
