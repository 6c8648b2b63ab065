"""Who gives up a slot, and how a chunk that wants more experts than there are slots is cut into waves.

Pure Python over expert ids. Knows nothing of MLX, slots' memory or files.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, KeysView, Mapping, Sequence
from heapq import heappop, heappush, heapreplace

LARGEST_WEIGHT = 2.0**500  # of a token, before values are scaled down; far from overflow
MOST_NOTED = 16  # calls of hits that are counted together


class LRFU:
    """The experts of one layer that hold a slot, from the first to give it up to the last.

    An expert's value is how many of the layer's tokens wanted it, each token counting half as much as the one
    `half_life` tokens after it (LRFU, Lee et al., IEEE Transactions on Computers 50(12), 2001). While few tokens were
    seen the half life is `first_share` of them, one token at least: what a text begins with is soon worth little.
    Values are kept for all experts, not only for those in slots, and outlive a resize. Who is worth least goes first.

    The defaults are what the traces in docs/notebook.md chose. `calls`: of the layer so far, as far as they are
    counted: calls of hits are noted, and counted when somebody asks for an order or there are many.
    """

    def __init__(self, half_life: float = 32, first_share: float = 1 / 12) -> None:
        self.calls = 0
        self._half_life = half_life
        self._settled_growth: float = 2.0 ** (1 / half_life)  # of the weight from a token to the next
        self._first_share = first_share
        self._tokens = 0
        self._weight = 1.0  # of the newest token: it grows, so that older ones need not be made smaller
        self._values: defaultdict[int, float] = defaultdict(float)
        self._last_call: dict[int, int] = {}
        self._noted: deque[tuple[Sequence[int], int]] = deque()  # calls of hits that are not counted yet
        self._heap: list[tuple[float, int]] = []  # one entry an expert in a slot, its value or what that once was

    def __iter__(self) -> Iterator[int]:
        self._catch_up()
        return iter(sorted(self._last_call, key=lambda expert: (self._values[expert], expert)))

    def __len__(self) -> int:
        return len(self._last_call)

    def __contains__(self, expert: object) -> bool:
        return expert in self._last_call

    @property
    def held(self) -> KeysView[int]:
        """The experts that hold a slot, in no order."""
        return self._last_call.keys()

    @property
    def last_calls(self) -> dict[int, int]:
        """The call in which each expert was last used, the first to give up its slot first."""
        return {expert: self._last_call[expert] for expert in self}

    @property
    def ages(self) -> list[int]:
        """How many calls ago each expert in a slot was last used, in no order: a look, from any thread."""
        return [self.calls - call for call in list(self._last_call.values())]

    def hit(self, experts: Sequence[int], top_k: int) -> None:
        """A whole call for `experts`, which all hold a slot: as `count` and `touch`, but short."""
        self._noted.append((experts, top_k))
        if len(self._noted) >= MOST_NOTED or len(experts) > top_k:
            self._catch_up()

    def count(self, experts: Sequence[int], top_k: int) -> None:
        """Begin a call whose tokens want these experts, in a slot or not: `top_k` for each token in turn."""
        self._catch_up()
        self._begin(experts, top_k)

    def admit(self, experts: Iterable[int], last_call: int = 0) -> None:
        """Let `experts`, which were in no slot, hold one; `last_call`: in which they were last used, 0 in none."""
        for expert in experts:
            heappush(self._heap, (self._values[expert], expert))
            self._last_call[expert] = last_call

    def touch(self, experts: Iterable[int]) -> None:
        """Note that the call at hand uses `experts`; those that were in no slot are from now on."""
        for expert in experts:
            if expert not in self._last_call:
                heappush(self._heap, (self._values[expert], expert))
            self._last_call[expert] = self.calls

    def restore(self, last_calls: Mapping[int, int]) -> None:
        """Let these experts and no others hold a slot."""
        self._catch_up()
        self._last_call = dict(last_calls)
        self._heap = sorted((self._values[expert], expert) for expert in last_calls)

    def evict(self, count: int, keep: Container[int]) -> dict[int, int]:
        """Remove the `count` experts that are worth least among those that are not in `keep`, or all of these.

        Returns the call in which each was last used, the first to go first.
        """
        self._catch_up()
        heap, values = self._heap, self._values
        victims: dict[int, int] = {}
        kept: list[tuple[float, int]] = []
        while heap and len(victims) < count:
            value, expert = heap[0]
            if value < values[expert]:  # values only grow, so whoever stands behind is worth at least this
                heapreplace(heap, (values[expert], expert))
            elif expert in keep:
                kept.append(heappop(heap))
            else:
                heappop(heap)
                victims[expert] = self._last_call.pop(expert)
        for entry in kept:
            heappush(heap, entry)
        return victims

    def clear(self) -> None:
        """Let no expert hold a slot; what each is worth stays."""
        self.restore({})

    def _catch_up(self) -> None:
        """Count the calls that were noted."""
        while self._noted:
            experts, top_k = self._noted.popleft()
            self._begin(experts, top_k)
            self._last_call.update(dict.fromkeys(experts, self.calls))

    def _begin(self, experts: Sequence[int], top_k: int) -> None:
        """Count a call; those noted before it must be counted already."""
        self.calls += 1
        for start in range(0, len(experts), top_k):
            self._tokens += 1
            life = self._tokens * self._first_share
            self._weight *= self._settled_growth if life >= self._half_life else 2.0 ** (1 / max(1.0, life))
            if self._weight > LARGEST_WEIGHT:
                self._scale_down()
            for expert in experts[start : start + top_k]:
                self._values[expert] += self._weight

    def _scale_down(self) -> None:
        """Divide every value by the newest token's weight."""
        heap = [(value / self._weight, expert) for value, expert in self._heap]
        values = {expert: value / self._weight for expert, value in self._values.items()}
        self._heap, self._values, self._weight = heap, defaultdict(float, values), 1.0


def wave_size(capacity: int) -> int:
    """The most experts of a wave that is read, in a bank of `capacity` slots."""
    return max(1, capacity // 4)


def plan_waves(
    last_use: Mapping[int, int], present: Container[int], coming: Container[int], capacity: int
) -> list[list[int]]:
    """Cut the experts that a call wants into waves, each expert in exactly one: one computes while the next is read.

    `last_use[e]`: position of the last token in the call that wants expert `e`; `present`: who holds a slot now;
    `coming`: who is being read already; `capacity`: slots. Those that are present come first, so that they compute
    while the others are read and none is evicted before it was used; then those that are coming; then the rest, in
    ascending order of their last use. What the end of a chunk wanted, which is what decode will want first, is read
    last and stays. No wave but one of present experts has more than a quarter of the slots: one computes, one is
    read, and half of the slots do not change hands for that.
    """
    assert capacity >= 1, "a bank has at least one slot"
    size = wave_size(capacity)
    order = sorted(last_use, key=last_use.__getitem__)
    hits = [expert for expert in order if expert in present]
    if len(hits) == len(order):
        return [order]
    misses = [expert for expert in order if expert in coming]
    misses += [expert for expert in order if expert not in present and expert not in coming]
    crowded = len(order) > capacity and len(hits) > capacity - size  # nothing can be read before some have computed
    waves = _cut(hits, size if crowded else capacity)
    return waves + _cut(misses, size)


def _cut(experts: list[int], size: int) -> list[list[int]]:
    return [experts[start : start + size] for start in range(0, len(experts), size)]
