"""What a comparison found: rows, and how two arrays are compared. Runs no model."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any, cast

import mlx.core as mx

from mlxmoe.errors import UnsupportedModelError
from mlxmoe.loading import LoadedModel
from mlxmoe.opening import OpenedModel


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One comparison. `part`: what ran. `slots`: least and most of any layer. `values`: numbers compared.

    `differing`: how many of them were not bit-identical; `largest`: the largest absolute difference; `bound`: what it
    may be (0: nothing may differ). `misses`, `evictions`: what the expert cache did meanwhile.
    """

    experts: str
    slots: tuple[int, int]
    part: str
    values: int
    differing: int
    largest: float
    bound: float
    misses: int
    evictions: int

    @property
    def passed(self) -> bool:
        return self.differing == 0 or self.largest <= self.bound


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All rows. `whole`: logits against the whole stock model; otherwise layer by layer."""

    model: str
    whole: bool
    rows: tuple[VerifyRow, ...]

    @property
    def identical(self) -> bool:
        """Whether something was compared and not one bit differed."""
        return bool(self.rows) and not any(row.differing for row in self.rows)

    @property
    def passed(self) -> bool:
        """Whether something was compared and every row kept to its bound."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def values(self) -> int:
        return sum(row.values for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical, "passed": self.passed, "values": self.values}


class Watch:
    """Counts what a model's expert cache does from here to the row."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._slots = loaded.plan.slots.values()
        self._counters = list(loaded.experts.counters.values())
        self._misses, self._evictions = self._sums()

    def row(self, experts: str, part: str, found: mx.array, expected: mx.array, bound: float = 0.0) -> VerifyRow:
        misses, evictions = self._sums()
        differing, largest = difference(found, expected)
        return VerifyRow(
            experts=experts,
            slots=(min(self._slots), max(self._slots)),
            part=part,
            values=expected.size,
            differing=differing,
            largest=largest,
            bound=bound,
            misses=misses - self._misses,
            evictions=evictions - self._evictions,
        )

    def _sums(self) -> tuple[int, int]:
        return sum(c.misses for c in self._counters), sum(c.evictions for c in self._counters)


def difference(found: mx.array, expected: mx.array) -> tuple[int, float]:
    """How many values of two arrays are not bit-identical, and the largest absolute difference.

    A shape or dtype that differs makes all of them differ. Bits are compared: NaN equals NaN, -0 does not equal 0.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return expected.size, float("inf")
    unsigned = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[found.dtype.size]
    unlike = found.view(unsigned) != expected.view(unsigned)
    count = cast(int, mx.sum(unlike).item())
    if not count:
        return 0, 0.0
    gap = mx.abs(found.astype(mx.float32) - expected.astype(mx.float32))
    return count, cast(float, mx.max(mx.where(unlike, gap, 0)).item())


def probe_tokens(vocab: int, count: int) -> list[int]:
    """`count` tokens drawn evenly from the vocabulary, the same at every call: they spread over many experts."""
    return random.Random(0).choices(range(vocab), k=count)


def expert_sizes(opened: OpenedModel) -> tuple[int, int]:
    """Bytes of what one token needs, and of all routed experts. Raises UnsupportedModelError without any."""
    floor = sum(layer.floor_bytes for layer in opened.layers)
    total = sum(layer.nbytes for layer in opened.layers)
    if not opened.layers:
        raise UnsupportedModelError("This model has no routed experts: there is nothing to stream and compare.")
    if floor == total:
        raise UnsupportedModelError("Every token of this model needs all its experts: there is nothing to stream.")
    return floor, total
