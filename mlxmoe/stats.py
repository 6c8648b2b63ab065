"""What an engine reports of itself: frozen facts, in the order people read them. Computes no more than sums."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mlxmoe.kv.prefix import PrefixStats
from mlxmoe.memory.guard import MemoryEvent
from mlxmoe.memory.plan import Plan
from mlxmoe.memory.reading import Reading

_SUMS = (
    "hits", "misses", "hit_rate", "evictions", "bytes_read",
    "early_bytes", "early_useful_bytes", "foreseen", "unforeseen", "lookahead_recall",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerStats:
    """One MoE layer's expert cache. A hit or miss is one expert wanted by one call (a chunk or a token).

    `slots` of `num_experts` are in memory; with all of them the layer is resident and counts nothing. `bytes_read`:
    because they were asked for. `early_bytes`: because lookahead guessed so, of which `early_useful_bytes` were asked
    for next. `foreseen`, `unforeseen`: experts asked for that a guess had named, or had not; of guessed calls only.
    """

    path: str
    num_experts: int
    slots: int
    hits: int
    misses: int
    evictions: int
    bytes_read: int
    early_bytes: int
    early_useful_bytes: int
    foreseen: int
    unforeseen: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """All MoE layers, and their sums.

    `memory_events`: what the memory guard did lately, the oldest first. `prefixes`: the prefix store's, if any.
    """

    layers: tuple[LayerStats, ...]
    memory_events: tuple[MemoryEvent, ...] = ()
    prefixes: PrefixStats | None = None

    @property
    def hits(self) -> int:
        return sum(layer.hits for layer in self.layers)

    @property
    def misses(self) -> int:
        return sum(layer.misses for layer in self.layers)

    @property
    def evictions(self) -> int:
        return sum(layer.evictions for layer in self.layers)

    @property
    def bytes_read(self) -> int:
        return sum(layer.bytes_read for layer in self.layers)

    @property
    def early_bytes(self) -> int:
        return sum(layer.early_bytes for layer in self.layers)

    @property
    def early_useful_bytes(self) -> int:
        return sum(layer.early_useful_bytes for layer in self.layers)

    @property
    def foreseen(self) -> int:
        return sum(layer.foreseen for layer in self.layers)

    @property
    def unforeseen(self) -> int:
        return sum(layer.unforeseen for layer in self.layers)

    @property
    def lookahead_recall(self) -> float | None:
        """Share of the wanted experts that lookahead had named; None where it did not guess."""
        guessed = self.foreseen + self.unforeseen
        return self.foreseen / guessed if guessed else None

    @property
    def hit_rate(self) -> float:
        """Share of wanted experts that were in a slot; 1 where nothing was streamed."""
        return hit_rate(self.hits, self.misses)

    def as_dict(self) -> dict[str, Any]:
        sums = {name: getattr(self, name) for name in _SUMS}
        prefixes = None if self.prefixes is None else self.prefixes.as_dict()
        events = [event.as_dict() for event in self.memory_events]
        return {
            **sums,
            "layers": [asdict(layer) for layer in self.layers],
            "memory_events": events,
            "prefixes": prefixes,
        }


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The plan beside what is so now, in bytes.

    `bank_bytes`: of the experts' slots, which requests and the guard may have made fewer than planned. `kv_bytes`:
    what the caches of requests under way and of sessions may grow to; where that is more than planned, the experts
    gave it. `reading`: what the machine says. `usable_bytes`: what it could give another engine now.
    """

    plan: Plan
    bank_bytes: int
    kv_bytes: int
    reading: Reading
    usable_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "plan": self.plan.as_dict(), "reading": self.reading.as_dict()}


def hit_rate(hits: int, misses: int) -> float:
    """Share of hits; 1 where nothing was asked for."""
    return hits / (hits + misses) if hits + misses else 1.0
