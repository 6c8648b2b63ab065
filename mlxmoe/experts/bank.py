"""The slots of one layer: which expert is where, filling and evicting. Knows nothing of models or pressure.

A slot belongs to an expert only once all its bytes are there. The slots' memory is allocated once and written in
place through memoryviews; the arrays are never assigned to (MLX would copy or move them, and two banks would be
alive at once).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from mlxmoe.experts.checkpoint import ExpertReader, ExpertTensor, Piece
from mlxmoe.experts.policy import LRU, plan_waves

if TYPE_CHECKING:
    from typing_extensions import Buffer

EMPTY = -1


@dataclass(slots=True)
class BankCounters:
    """What one bank did so far. A hit or a miss is counted once for each expert and call that wants it."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_read: int = 0


class ExpertBank:
    """Room for `slots` of a layer's experts: for each expert tensor one array `[slots, ...]`.

    `templates`: the layer's stacked arrays `[experts, ...]`, unevaluated: their shapes and dtypes are taken, never
    their contents. `tensors`: where the bytes of each lie, under the same names.
    """

    def __init__(
        self,
        tensors: Mapping[str, ExpertTensor],
        templates: Mapping[str, mx.array],
        slots: int,
        reader: ExpertReader,
    ) -> None:
        assert tensors.keys() == templates.keys(), "every array has a place on disk"
        self.num_experts = next(iter(templates.values())).shape[0]
        assert 1 <= slots <= self.num_experts, "a slot for nobody is wasted memory"
        self.slots = slots
        self.counters = BankCounters()
        self._tensors = [tensors[name] for name in templates]
        self._reader = reader
        self.arrays = {name: mx.zeros((slots, *a.shape[1:]), dtype=a.dtype) for name, a in templates.items()}
        mx.eval(*self.arrays.values())
        self._views = [_slot_views(array) for array in self.arrays.values()]
        for tensor, views in zip(self._tensors, self._views, strict=True):
            assert len(views[0]) == tensor.nbytes, "an expert on disk and a slot are of one size"
        self._policy = LRU()
        self._slot_of = [EMPTY] * self.num_experts
        self._free = list(range(slots))
        self._changing = False

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: all its tensors together."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes that the slots occupy, filled or not."""
        return self.slots * self.expert_bytes

    @property
    def resident(self) -> dict[int, int]:
        """Who is where: expert -> slot, the least recently used first."""
        return {expert: self._slot_of[expert] for expert in self._policy}

    def slots_of(self, experts: Sequence[int]) -> list[int]:
        """The slot of each of `experts`, which must all have been admitted by the wave at hand."""
        slot_of = self._slot_of
        return [slot_of[expert] for expert in experts]

    def waves(self, last_use: Mapping[int, int]) -> list[list[int]]:
        """Cut the wanted experts (expert -> last position that wants it) into waves that fit; counts hits."""
        if self._changing:  # an earlier admit was cut short: nothing it left behind can be relied on
            self.clear()
        waves = plan_waves(last_use, self._policy, self.slots)
        hits = sum(expert in self._policy for expert in last_use)
        self.counters.hits += hits
        self.counters.misses += len(last_use) - hits
        return waves

    def admit(self, wave: Sequence[int], last_use: Mapping[int, int]) -> None:
        """Have every expert of `wave` in a slot. Overwrites slots: whatever reads them must have been evaluated.

        However this ends (a failed read, Ctrl-C), no slot claims bytes that it does not hold.
        Raises CheckpointReadError.
        """
        self._changing = True
        missing = [expert for expert in wave if expert not in self._policy]
        if missing:
            self._make_room(len(missing), wave)
            targets = self._free[: len(missing)]
            self._reader.read(self._pieces(missing, targets))
            del self._free[: len(missing)]
            for expert, slot in zip(missing, targets, strict=True):
                self._slot_of[expert] = slot
            self.counters.bytes_read += len(missing) * self.expert_bytes
        if len(wave) == len(last_use):
            self._policy.touch(wave)
        else:  # of several waves: those already computed give way by their last use, not by their wave
            present = [expert for expert in self._policy if expert in last_use]
            self._policy.touch(sorted({*present, *wave}, key=last_use.__getitem__))
        self._changing = False

    def clear(self) -> None:
        """Forget every expert; the memory stays."""
        self._policy.clear()
        self._slot_of = [EMPTY] * self.num_experts
        self._free = list(range(self.slots))
        self._changing = False

    def view(self, name: str, slot: int) -> memoryview:
        """The bytes of one tensor of one slot, writable."""
        return self._views[list(self.arrays).index(name)][slot]

    def _make_room(self, count: int, keep: Sequence[int]) -> None:
        short = count - len(self._free)
        if short > 0:
            for expert in self._policy.evict(short, set(keep)):
                self._free.append(self._slot_of[expert])
                self._slot_of[expert] = EMPTY
            self.counters.evictions += short

    def _pieces(self, experts: Sequence[int], slots: Sequence[int]) -> list[Piece]:
        return [
            Piece(tensor.files[expert], tensor.offsets[expert], views[slot])
            for expert, slot in zip(experts, slots, strict=True)
            for tensor, views in zip(self._tensors, self._views, strict=True)
        ]


def _slot_views(array: mx.array) -> list[memoryview]:
    """The memory of each slot of an evaluated array `[slots, ...]`, as bytes."""
    whole = memoryview(cast("Buffer", array))
    assert whole.c_contiguous, "a fresh array is contiguous"
    flat = whole.cast("B")
    stride = flat.nbytes // array.shape[0]
    return [flat[start : start + stride] for start in range(0, flat.nbytes, stride)]
