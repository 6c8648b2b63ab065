"""How a model's KV caches grow, read off forward passes that are never evaluated. Knows no budget and no weights.

mlx-lm's own classes grow by known laws; any other cache is looked at after passes of several lengths, array by array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlxmoe.kv.choose import KVChoice
from mlxmoe.kv.layers import leaves_of
from mlxmoe.kv.window import SlidingWindowKVCache
from mlxmoe.memory.plan import KV_STEP, KVBytes, Rows

KNOWN = (KVCache, QuantizedKVCache, RotatingKVCache, ChunkedKVCache, SlidingWindowKVCache)

Arrays = Mapping[str, mx.array]


def kv_growth(
    model: nn.Module,
    make_caches: Callable[[nn.Module], list[Any]] = make_prompt_cache,
    after_one: Sequence[Any] | None = None,
) -> KVBytes:
    """What the caches that `make_caches` makes for `model` take after a prompt. Evaluates nothing.

    `after_one`: such caches after a pass of one token, if there are any.
    """
    first = _after(model, make_caches(model), 1) if after_one is None else leaves_of(after_one)
    lengths = (1, *_telling_lengths(first))
    seen = [first, *(_after(model, make_caches(model), tokens) for tokens in lengths[1:])]
    fixed, step = 0, 0
    rows: list[Rows] = []
    for entries in zip(*seen, strict=True):
        for found in _rows_of(entries, lengths):
            if found.law == "steps":
                step += KV_STEP * found.row_bytes
            elif found.law == "tokens" and found.size == 1:
                fixed += found.row_bytes
            else:
                rows.append(found)
    return KVBytes(fixed, step, tuple(rows))


def handed_rows(model: nn.Module, choice: KVChoice, chunk_tokens: int) -> tuple[Rows, ...]:
    """What a layer is handed beside what its cache stores, in chunks of `chunk_tokens`. Evaluates nothing.

    One layer after the other is, so they are those of the widest: of a window its rows and the chunk's, as far as
    the text has so many, and its sinks once more for every step of the positions; of bits alone all rows.
    """
    settings, positions = choice.settings, choice.positions
    caches = [cache for cache in _after(model, make_prompt_cache(model), 1) if type(cache) is KVCache]
    row_bytes = max(
        (sum(array.nbytes for array in _arrays(cache).values()) // KV_STEP for cache in caches), default=0
    )
    if settings.lossless:
        return ()
    if settings.window is None:
        return (Rows(row_bytes, "steps"),)
    rows = (Rows(row_bytes, "sliding", settings.window + chunk_tokens),)
    if positions is None:
        return rows
    again = -(-row_bytes * settings.sinks // positions.step)
    return (*rows, Rows(again, "sliding", chunk_tokens + positions.step))


def _telling_lengths(caches: Sequence[Any]) -> tuple[int, ...]:
    """An odd and an even number of tokens after which caches of unknown growth show it; none for known classes.

    States of a fixed size show it early, and their definitions may loop over the tokens: those passes are short.
    """
    unknown = [cache for cache in caches if not isinstance(cache, KNOWN)]
    if all(isinstance(cache, ArraysCache) for cache in unknown):
        return (33, 64) if unknown else ()
    past_windows = max(getattr(cache, "window_size", None) or 0 for cache in unknown) + 1
    return 257, -(-past_windows // 1024) * 1024


def _after(model: nn.Module, caches: list[Any], tokens: int) -> list[Any]:
    """The model's `caches` after one pass of `tokens`, not evaluated."""
    model(mx.zeros((1, tokens), dtype=mx.int32), cache=caches)
    return leaves_of(caches)


def _rows_of(entries: Sequence[Any], lengths: Sequence[int]) -> list[Rows]:
    """How one cache grows, from itself after a pass of each of `lengths`."""
    one = entries[0]
    arrays = [_arrays(entry) for entry in entries]
    nbytes = sum(array.nbytes for array in arrays[0].values())
    match one:
        case SlidingWindowKVCache():
            law = Rows(one.row_bytes, "steps") if one.window is None else Rows(one.row_bytes, "sliding", one.window)
            return [law]
        case RotatingKVCache():
            return [Rows(nbytes // min(KV_STEP, one.max_size), "window", one.max_size)]
        case ChunkedKVCache():
            return [Rows(nbytes // KV_STEP, "chunk", one.chunk_size)]
        case KVCache() | QuantizedKVCache():
            return [Rows(nbytes // KV_STEP, "steps")]
    return _rows_seen(arrays, lengths)


def _rows_seen(arrays: Sequence[Arrays], lengths: Sequence[int]) -> list[Rows]:
    """The rows of a cache of an unknown class, array by array, from how many each has after each of `lengths`.

    An array that has one row at the odd lengths and none at the even one holds the group that is still open, of the
    size that another array's groups show.
    """
    rows: list[Rows] = []
    open_group = 0
    for name in dict.fromkeys(name for found in arrays for name in found):
        counts, row_bytes = _row_counts([found.get(name) for found in arrays])
        if counts[-1] < counts[0]:
            open_group += row_bytes
        elif counts[-1] > counts[-2]:
            rows.append(Rows(row_bytes, "groups", lengths[-1] // counts[-1]))
        elif counts[-1] > counts[0]:
            rows.append(Rows(row_bytes, "tokens", counts[-1]))
        else:
            rows.append(Rows(row_bytes * counts[-1], "tokens", 1))
    if open_group:
        groups = [one.size for one in rows if one.law == "groups"]
        rows.append(Rows(open_group, "open group", groups[0]) if groups else Rows(open_group, "tokens", 1))
    return rows


def _row_counts(seen: Sequence[mx.array | None]) -> tuple[list[int], int]:
    """How many rows one array has after each of the passes, along the axis that changes, and the bytes of a row."""
    present = [array for array in seen if array is not None]
    full = max(present, key=lambda array: array.size)
    shapes = [array.shape for array in present]
    axis = next((axis for axis in range(full.ndim) if len({shape[axis] for shape in shapes}) > 1), None)
    counts = [0 if array is None else 1 if axis is None else array.shape[axis] for array in seen]
    return counts, full.nbytes if axis is None else full.nbytes // max(1, full.shape[axis])


def _arrays(cache: Any) -> dict[str, mx.array]:
    """The arrays that a cache holds, by where it holds them."""
    return {name: value for name, value in tree_flatten(vars(cache)) if isinstance(value, mx.array)}
