"""Several texts with a window each, decoded together: a batch in mlx-lm's sense. Knows nothing of models.

Legend: B texts, H heads, T tokens of a call, S rows handed out for each text, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlxmoe.errors import UnsupportedModelError, WindowError
from mlxmoe.kv.window import SlidingWindowKVCache


class BatchSlidingWindowKVCache:
    """One layer's caches of B texts, in the place of mlx-lm's BatchKVCache. `SlidingWindowKVCache.merge` makes it.

    Each text keeps a cache of its own, with its sinks, bits, window and positions: a call's row i goes to cache i,
    and what the caches hand out is filled up with zeros to one length S that the mask leaves out. So a text sees what
    it would see alone, however long the others are, and texts may join and leave between two calls.

    The rows that a layer computes with are put together anew in every call: B * S rows for one layer after the other,
    beside those that are stored.
    """

    def __init__(self, caches: Iterable[SlidingWindowKVCache]) -> None:
        """Of caches of one text each, which are not modified later on. Raises WindowError where they differ in kind.

        Raises UnsupportedModelError for a rotation that turns faster in a longer text: it can be given one length.
        """
        self._caches = [copy.deepcopy(cache) for cache in caches]
        self._left: list[int] | None = None  # tokens still to come of each text, where calls are padded on the right
        for cache in self._caches:
            _check(cache, self._caches[0])

    @property
    def offset(self) -> mx.array:
        """`[B]`: the position of each text's next token, for the model's rotation."""
        return mx.array([cache.offset for cache in self._caches], dtype=mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take in `[B, H, T, D]` rows; `[B, H, S, D]` with all rows that each text's tokens attend to."""
        counts = self._counts(keys.shape[2])
        handed = []
        for i, (cache, count) in enumerate(zip(self._caches, counts, strict=True)):
            rows = keys[i : i + 1, :, :count], values[i : i + 1, :, :count]
            handed.append(cache.update_and_fetch(*rows) if count else rows)
        if self._left is not None:
            self._left = [left - count for left, count in zip(self._left, counts, strict=True)]
        keys, values = (_stacked(list(part)) for part in zip(*handed, strict=True))
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        """`[B, 1, N, S]`: which of the rows that the next call of N tokens is handed each token of a text attends to.

        Where nothing is filled up and one text's cache would need no array, none either. A token that fills up a
        text attends to what the text's last one does.
        """
        counts = self._counts(N)
        each = [
            cache.make_mask(count, return_array, window_size) if count else mx.ones((1, 1), dtype=mx.bool_)
            for cache, count in zip(self._caches, counts, strict=True)
        ]
        lengths = [_length(*one) for one in zip(self._caches, counts, each, strict=True)]
        alike = min(counts) == N and len(set(lengths)) == 1
        if alike and not any(isinstance(mask, mx.array) for mask in each):
            return each[0]
        rows = []
        for cache, count, mask, length in zip(self._caches, counts, each, lengths, strict=True):
            if isinstance(mask, str):
                mask = cache.make_mask(count, return_array=True, window_size=window_size)
            if not isinstance(mask, mx.array):
                mask = mx.ones((count, length), dtype=mx.bool_)
            mask = mask[mx.minimum(mx.arange(N), mask.shape[0] - 1)]
            rows.append(mx.pad(mask, [(0, 0), (0, max(lengths) - length)]))
        return mx.stack(rows)[:, None]

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce calls that are padded on the right, to be taken as `lengths` tokens of each text in all.

        Raises WindowError for padding on the left, and for padding without lengths.
        """
        if left_padding is not None and max(left_padding) > 0:
            raise WindowError("A batch with a window or kv_bits is padded on the right: left_padding cannot be had.")
        if right_padding is None or max(right_padding) <= 0:
            return
        if lengths is None or len(lengths) != len(self._caches):
            raise WindowError(f"right_padding needs lengths, one for each of the {len(self._caches)} texts.")
        self._left = [int(length) for length in lengths]

    def finalize(self) -> None:
        """The padded calls are over. Padding was never stored: there is nothing to take out."""
        self._left = None

    def filter(self, batch_indices: Iterable[int]) -> None:
        """Keep the texts of these numbers, in this order."""
        kept = [int(i) for i in batch_indices]
        self._caches = [self.extract(i) for i in kept]
        if self._left is not None:
            self._left = [self._left[i] for i in kept]

    def extend(self, other: BatchSlidingWindowKVCache) -> None:
        """The texts of `other`, which is not modified, behind one's own. Raises WindowError where they differ."""
        if self._left is not None or other._left is not None:
            raise WindowError("No text can join between prepare() and finalize(): call finalize() first.")
        self._caches = BatchSlidingWindowKVCache([*self._caches, *other._caches])._caches

    def extract(self, idx: int) -> SlidingWindowKVCache:
        """A text's cache, to go on with by itself. The batch may go on too: neither changes the other."""
        return copy.deepcopy(self._caches[idx])

    def size(self) -> int:
        """Tokens in the cache of the text that has most."""
        return max((cache.size() for cache in self._caches), default=0)

    def empty(self) -> bool:
        return all(cache.empty() for cache in self._caches)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return sum(cache.nbytes for cache in self._caches)

    def is_trimmable(self) -> bool:
        """Whether every text's tokens are all still there."""
        return all(cache.is_trimmable() for cache in self._caches)

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens of each text, or as many as the shortest has; 0 once it is not trimmable."""
        if not self.is_trimmable():
            return 0
        n = max(0, min([n, *(cache.seen for cache in self._caches)]))
        return min((cache.trim(n) for cache in self._caches), default=0)

    @property
    def state(self) -> tuple[Any, ...]:
        """All there is of it, in arrays, numbers and None. `from_state` makes an equal one."""
        return [cache.state for cache in self._caches], self._left

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        caches, left = state
        self._caches = [SlidingWindowKVCache.from_state(cache) for cache in caches]
        self._left = None if left is None else list(left)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> BatchSlidingWindowKVCache:
        """A batch of the `state` of another one, also when that was stored and read again."""
        batch = cls(())
        batch.state = state
        return batch

    def _counts(self, tokens: int) -> list[int]:
        """How many of a call's tokens are each text's own; the others fill it up."""
        if self._left is None:
            return [tokens] * len(self._caches)
        counts = [min(tokens, left) for left in self._left]
        if not any(counts):
            raise WindowError("All tokens that prepare() announced were taken in: call finalize() before the next.")
        return counts


def _check(cache: SlidingWindowKVCache, first: SlidingWindowKVCache) -> None:
    """Raise for what cannot be in one batch with `first`."""
    kind, wanted = (
        {"window": one.window, "sinks": one.sinks, "kv_bits": one.kv_bits, "positions": one.positions}
        for one in (cache, first)
    )
    if kind != wanted:
        differing = ", ".join(f"{key}={kind[key]} and {wanted[key]}" for key in kind if kind[key] != wanted[key])
        raise WindowError(f"Texts with {differing} cannot be in one batch: give them the same.")
    stored = cache.keys if isinstance(cache.keys, list) else [cache.keys]
    if not cache.empty() and stored[0].shape[0] != 1:
        raise WindowError(f"A cache of {stored[0].shape[0]} texts cannot be merged: merge caches of one text each.")
    if cache.rotation is not None and not cache.rotation.steady:
        raise UnsupportedModelError(
            "Texts of a model whose rotation depends on their length (dynamic NTK) cannot be in one batch. "
            "Run them one after the other."
        )


def _length(cache: SlidingWindowKVCache, count: int, mask: mx.array | str | None) -> int:
    """How many rows `cache` hands out for its next `count` tokens, which it has `mask` for."""
    if isinstance(mask, mx.array):
        return mask.shape[1]
    after = cache.seen + count
    return after if cache.window is None else min(after, cache.window)


def _stacked(rows: list[mx.array]) -> mx.array:
    """`[B, H, S, D]` of `[1, H, *, D]` each, filled up with zeros to the longest."""
    length = max(part.shape[2] for part in rows)
    filled = []
    for part in rows:
        _, heads, present, width = part.shape
        if present < length:
            zeros = mx.zeros((1, heads, length - present, width), dtype=part.dtype)
            part = mx.concatenate([part, zeros], axis=2) if present else zeros
        filled.append(part)
    return mx.concatenate(filled)
