"""The KV caches of several texts as one of a batch: texts join and leave between two passes. Knows no tokens.

The batch caches are mlx-lm's own, and ours where there is a window: a text's rows stand beside the others', filled up
to the longest. One text alone has its own cache, as it has without a batch, and so the very bits. Everything happens
layer after layer, so that beside what is kept only one layer is in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from mlxmoe.decode import Cache
from mlxmoe.kv.layers import leaves_of
from mlxmoe.registry import decodes_together


class SharedCache:
    """One cache for the texts of a batch, in the order in which they joined. MLX computes here: within a turn.

    `cache`: what the next pass of all texts is given.
    """

    def __init__(self) -> None:
        self.cache: Cache = []
        self.texts = 0

    def join(self, cache: Cache) -> None:
        """The text of `cache` takes the last row. Its entries go into the batch: `cache` is empty thereafter."""
        if self.texts == 0:
            self.cache = list(cache)
            cache.clear()
        else:
            for layer in range(len(self.cache)):
                entry, joins = self.cache[layer], cache[layer]
                if self.texts == 1:
                    entry = self.cache[layer] = entry.merge([entry, joins])
                else:
                    entry.extend(joins.merge([joins]))
                cache[layer] = joins = None
                mx.eval(entry.state)
            cache.clear()
        self.texts += 1

    def leave(self, rows: Sequence[int]) -> None:
        """The texts of these `rows` are over; those behind them move up."""
        stay = [row for row in range(self.texts) if row not in rows]
        if len(stay) == 1 and self.texts > 1:
            for layer, entry in enumerate(self.cache):
                self.cache[layer] = _alone(entry, stay[0])
        elif not stay:
            self.cache = []
        elif len(stay) < self.texts:
            for entry in self.cache:
                entry.filter(stay)
                _own_memory(entry)
                mx.eval(entry.state)
        self.texts = len(stay)

    def extract(self, row: int) -> Cache:
        """The cache of one text, to go on with alone; the batch stays as it is."""
        if self.texts == 1:
            return list(self.cache)
        return [_alone(entry, row) for entry in self.cache]


def can_share(model_type: str, model: nn.Module, cache: Cache) -> bool:
    """Whether texts may stand beside each other.

    The model type was found right in a batch, every entry of `cache`, a text's own, is of a kind that has one for a
    batch, and `model` has no rotation that depends on how long a text is (dynamic NTK): it takes one length.
    """
    if not decodes_together(model_type):
        return False
    if any(isinstance(module, DynamicNTKScalingRoPE) for module in model.modules()):
        return False
    return all(hasattr(entry, "merge") for entry in leaves_of(cache))


def _alone(entry: Any, row: int) -> Any:
    """One text's own cache in a layer, evaluated."""
    one = entry.extract(row)
    mx.eval(one.state)
    return one


def _own_memory(entry: Any) -> None:
    """Let go of rows that mlx-lm's batch cache has only hidden: a slice keeps the memory of the whole."""
    for leaf in leaves_of([entry]):
        if isinstance(leaf, BatchKVCache) and leaf.keys is not None:
            leaf.keys, leaf.values = mx.contiguous(leaf.keys), mx.contiguous(leaf.values)
