"""The memory of a layer's slots: arrays in the layer's own module, and where the bytes of an expert go in them.

It is written in place through memoryviews; the arrays are never assigned to (MLX would copy or move them, and two
would be alive at once). The module itself holds them, so that what computes and what is written to cannot be two
different arrays. Knows neither who is in which slot nor when anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import mlx.core as mx

from mlxmoe.experts.checkpoint import ExpertTensor
from mlxmoe.experts.reader import Piece

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Home(NamedTuple):
    """Where an expert array lives: the module that computes from it, which is a dict, and its name there."""

    owner: dict[str, Any]
    key: str

    @property
    def array(self) -> mx.array:
        return cast(mx.array, self.owner[self.key])


class SlotMemory:
    """For each expert tensor one array `[slots, ...]`, at its home. `recover` comes before the first use.

    `homes`: where the layer's stacked arrays `[experts, ...]` are. They are replaced, only their shapes and dtypes
    are used; where `slots` is None they hold every expert already, and stay. `tensors`: where the bytes of each lie,
    under the same names. `slots`: how many there are. `expert_bytes`: of one expert, all its tensors together.
    """

    def __init__(self, tensors: Mapping[str, ExpertTensor], homes: Mapping[str, Home], slots: int | None) -> None:
        assert tensors.keys() == homes.keys(), "every array has a place on disk"
        self.num_experts: int = next(iter(homes.values())).array.shape[0]
        assert slots is None or 1 <= slots <= self.num_experts, "a slot for nobody is wasted memory"
        self.slots = self.num_experts if slots is None else slots
        self._homes = dict(homes)
        self._tensors = [tensors[name] for name in homes]
        self._views: list[list[memoryview]] = []
        self.expert_bytes = sum(tensor.nbytes for tensor in self._tensors)
        if slots is not None:
            for home in homes.values():
                array = home.array
                home.owner[home.key] = mx.zeros((slots, *array.shape[1:]), dtype=array.dtype)

    @property
    def arrays(self) -> dict[str, mx.array]:
        """One for each expert tensor."""
        return {name: home.array for name, home in self._homes.items()}

    @property
    def nbytes(self) -> int:
        """Bytes that the slots occupy, filled or not."""
        return sum(home.array.nbytes for home in self._homes.values())

    def move(self, source: Mapping[int, int], slots: int) -> None:
        """Have `slots` slots, slot `n` with what slot `source[n]` held; what the others hold does not matter.

        One array is replaced after the other, so what is needed beside them is one array. Where that is cut short,
        `recover` is to be called.
        """
        for home in self._homes.values():
            self._views.clear()  # they keep the old arrays alive
            home.owner[home.key] = _rows(home.array, source, slots)
            mx.clear_cache()
        self._bind()

    def recover(self) -> None:
        """After anything that was cut short. Arrays longer than others are cut: kernels want one number of slots."""
        count = min(home.array.shape[0] for home in self._homes.values())
        for home in self._homes.values():
            if home.array.shape[0] > count:
                self._views.clear()
                home.owner[home.key] = _rows(home.array, {}, count)
        self._bind()

    def view(self, name: str, slot: int) -> memoryview:
        """The bytes of one tensor of one slot, writable."""
        return self._views[list(self._homes).index(name)][slot]

    def pieces(self, experts: Sequence[int], slots: Sequence[int]) -> list[Piece]:
        """What to read for each of `experts` to be in the slot beside it."""
        return [
            Piece(tensor.files[expert], tensor.offsets[expert], views[slot])
            for expert, slot in zip(experts, slots, strict=True)
            for tensor, views in zip(self._tensors, self._views, strict=True)
        ]

    def _bind(self) -> None:
        """Take the arrays as they are at home: their number of slots, and a view of each."""
        arrays = list(self.arrays.values())
        mx.eval(arrays)
        (self.slots,) = {array.shape[0] for array in arrays}
        self._views = [_slot_views(array) for array in arrays]
        for tensor, views in zip(self._tensors, self._views, strict=True):
            assert len(views[0]) == tensor.nbytes, "an expert on disk and a slot are of one size"


def _slot_views(array: mx.array) -> list[memoryview]:
    """The memory of each slot of an evaluated array `[slots, ...]`, as bytes."""
    whole = memoryview(cast("Buffer", array))
    assert whole.c_contiguous, "a fresh array is contiguous"
    flat = whole.cast("B")
    stride = flat.nbytes // array.shape[0]
    return [flat[start : start + stride] for start in range(0, flat.nbytes, stride)]


def _rows(array: mx.array, source: Mapping[int, int], count: int) -> mx.array:
    """`count` rows, of which row `n` is row `source[n]` of `array`; what the others hold does not matter."""
    rows = mx.take(array, mx.array([source.get(row, 0) for row in range(count)]), axis=0)
    mx.eval(rows)
    return rows
