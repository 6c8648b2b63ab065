"""A model's caches around one prefill chunk: what they hold before it and after it, with nothing evaluated.

Knows the caches and not the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from mlxmoe.experts.switch import Listening
from mlxmoe.kv.layers import leaves_of
from mlxmoe.kv.window import SlidingWindowKVCache
from mlxmoe.memory.plan import KV_STEP

MakeCaches = Callable[[nn.Module], list[Any]]


def has_states(model: nn.Module) -> bool:
    """Whether any cache of `model` holds a state instead of keys and values: those may be computed by a loop."""
    return count_states(make_prompt_cache(model)) > 0


def count_states(caches: Sequence[Any]) -> int:
    """How many of them hold a state."""
    return sum(isinstance(cache, ArraysCache) for cache in leaves_of(caches))


def state_bytes(
    model: nn.Module, modules: Mapping[str, nn.Module], chunk: int, seen: int, make_caches: MakeCaches
) -> int:
    """What the caches of the whole model hold after that chunk: windows hold more than they keep."""
    caches = seen_caches(make_caches(model), model, modules, seen, chunk)
    with Listening(dict(modules)):
        model(mx.zeros((1, chunk), dtype=mx.int32), cache=caches)
    return sum(array.nbytes for array in states_of(caches))


def seen_caches(
    caches: list[Any], model: nn.Module, modules: Mapping[str, nn.Module], seen: int, chunk: int
) -> list[Any]:
    """`caches` after `seen` tokens, unevaluated; the last of them came in one chunk, as windows depend on it."""
    with Listening(dict(modules)):
        if seen > chunk:
            with _sinks_once(caches):
                _see(model, caches, seen - chunk)
        if seen:
            model(mx.zeros((1, min(seen, chunk)), dtype=mx.int32), cache=caches)
    return caches


def _see(model: nn.Module, caches: list[Any], count: int) -> None:
    """Let `caches` see `count` tokens; the model itself no more than a step of them where it has states.

    Those are of one size after any number, but their definitions may build a graph as long as the text.
    """
    leaves = leaves_of(caches)
    rest = count - KV_STEP if any(isinstance(entry, ArraysCache) for entry in leaves) else 0
    given: list[tuple[Any, mx.array, mx.array]] = []
    with _overheard(leaves, given):
        model(mx.zeros((1, count - max(0, rest)), dtype=mx.int32), cache=caches)
    if rest > 0:
        for entry, *rows in given:
            entry.update_and_fetch(*(mx.zeros((*part.shape[:2], rest, part.shape[3]), part.dtype) for part in rows))


@contextmanager
def _overheard(leaves: Sequence[Any], given: list[tuple[Any, mx.array, mx.array]]) -> Iterator[None]:
    """Within this context the keys and values that caches are given are noted."""

    def noting(entry: Any, take: Callable[[mx.array, mx.array], Any]) -> Callable[[mx.array, mx.array], Any]:
        def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
            given.append((entry, keys, values))
            return take(keys, values)

        return update_and_fetch

    told = [entry for entry in leaves if hasattr(entry, "update_and_fetch")]
    try:
        for entry in told:
            entry.update_and_fetch = noting(entry, entry.update_and_fetch)
        yield
    finally:
        for entry in told:
            vars(entry).pop("update_and_fetch", None)


@contextmanager
def _sinks_once(caches: Sequence[Any]) -> Iterator[None]:
    """Within this context windows hand out no sinks again for steps of their positions: what they keep is the same.

    All of a long text in one call would have as many of them as it has steps, for nothing.
    """
    windows = [entry for entry in leaves_of(caches) if isinstance(entry, SlidingWindowKVCache)]
    positions = [window.positions for window in windows]
    try:
        for window in windows:
            window.positions = None
        yield
    finally:
        for window, own in zip(windows, positions, strict=True):
            window.positions = own


def arrays_of(caches: Sequence[Any]) -> list[mx.array]:
    """Every array that the caches hold, in the order in which `put_arrays` takes them."""
    found: list[mx.array] = []
    for entry in leaves_of(caches):
        tree_map(lambda value: found.append(value) if isinstance(value, mx.array) else None, dict(vars(entry)))
    return found


def put_arrays(caches: Sequence[Any], arrays: Iterator[mx.array]) -> None:
    """Have `caches` hold `arrays` in place of theirs."""
    for entry in leaves_of(caches):
        held = tree_map(lambda value: next(arrays) if isinstance(value, mx.array) else value, dict(vars(entry)))
        vars(entry).update(held)


def states_of(caches: Sequence[Any]) -> list[mx.array]:
    """What the decoder evaluates after a chunk."""
    return [array for entry in caches for _, array in tree_flatten(entry.state) if isinstance(array, mx.array)]
