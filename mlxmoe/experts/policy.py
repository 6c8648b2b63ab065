"""Who gives up a slot, and how a chunk that wants more experts than there are slots is cut into waves.

Pure Python over expert ids. Knows nothing of MLX, slots' memory or files.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping


class LRU:
    """The experts of one layer that hold a slot, from the least to the most recently used.

    `calls`: of the layer so far; whoever uses the policy counts them.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._last_call: dict[int, int] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._last_call)

    def __contains__(self, expert: object) -> bool:
        return expert in self._last_call

    @property
    def last_calls(self) -> dict[int, int]:
        """The call in which each expert was last used, the least recently used first."""
        return dict(self._last_call)

    def touch(self, experts: Iterable[int]) -> None:
        """Make `experts` the most recently used, the last one most of all."""
        for expert in experts:
            self._last_call.pop(expert, None)
            self._last_call[expert] = self.calls

    def restore(self, last_calls: Mapping[int, int]) -> None:
        """Hold these experts and no others, the least recently used first."""
        self._last_call = dict(last_calls)

    def evict(self, count: int, keep: Container[int]) -> list[int]:
        """Remove and return the `count` least recently used experts that are not in `keep`."""
        victims: list[int] = []
        for expert in self._last_call:
            if len(victims) == count:
                break
            if expert not in keep:
                victims.append(expert)
        assert len(victims) == count, "a wave never wants more experts than there are slots"
        for expert in victims:
            del self._last_call[expert]
        return victims

    def clear(self) -> None:
        self._last_call.clear()


def plan_waves(last_use: Mapping[int, int], resident: Container[int], capacity: int) -> list[list[int]]:
    """Cut the experts that a chunk wants into waves that fit the bank, each expert in exactly one.

    `last_use[e]`: position of the last token in the chunk that wants expert `e`; `resident`: who holds a slot
    now; `capacity`: slots. The first wave takes all that are resident, so that no hit is evicted before it was
    used, and fills up with misses. The other misses come in ascending order of their last use and only half of
    the slots change hands from wave to wave: what the end of the chunk wanted, which is what decode will want
    first, is in the bank when the chunk is done. Within a wave experts ascend by last use too.
    """
    assert capacity >= 1, "a bank has at least one slot"
    hits = sorted((e for e in last_use if e in resident), key=last_use.__getitem__)
    misses = sorted((e for e in last_use if e not in resident), key=last_use.__getitem__)
    room = capacity - len(hits)
    if len(misses) <= room:
        return [sorted(last_use, key=last_use.__getitem__)]
    waves = [sorted(hits + misses[:room], key=last_use.__getitem__)]
    step = max(1, capacity - capacity // 2)
    waves += [misses[start : start + step] for start in range(room, len(misses), step)]
    return [wave for wave in waves if wave]
