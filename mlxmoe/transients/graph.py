"""The graph of one prefill chunk as data: primitives, values, and what streaming layers evaluate. Builds none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from mlxmoe.experts.layer import KEEP_PENDING_BYTES


class Value(NamedTuple):
    """An array of the graph, by the name that the export gave it. There are very many."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Node:
    """One primitive."""

    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    arguments: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Step:
    """What a streaming layer evaluates: its indices, the waves' parts one by one, its output if that is large."""

    indices: str
    parts: tuple[str, ...]
    out: str
    out_bytes: int

    @property
    def kept_bytes(self) -> int:
        """What stays until the pass is over, because it is too small to be evaluated by itself."""
        return self.out_bytes if self.out_bytes <= KEEP_PENDING_BYTES else 0


@dataclass(slots=True)
class TracedChunk:
    """A chunk's graph. `prior`: the caches' arrays before it; `states`: those after it, `state_bytes` together.

    `state_caches`: how many of the caches hold a state instead of keys and values. `left_out`: of a deep model, how
    many layers that stream are not in the graph; None where it has all layers.
    """

    nodes: list[Node] = field(default_factory=list)
    prior: list[Value] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    state_bytes: int = 0
    state_caches: int = 0
    steps: list[Step] = field(default_factory=list)
    left_out: int | None = None
