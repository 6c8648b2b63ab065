"""A KV cache that keeps a window and its sinks, quantised where asked. Knows nothing of models and of who calls it.

Legend: B sequences, H heads, T tokens of a call, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from mlxmoe.kv.masks import window_mask
from mlxmoe.kv.packing import Packed, Packing, cut, empty_like, join, nbytes, write
from mlxmoe.kv.positions import Positions, Rotation
from mlxmoe.kv.settings import KVSettings
from mlxmoe.memory.plan import KV_STEP

if TYPE_CHECKING:
    from mlxmoe.kv.batch import BatchSlidingWindowKVCache

# Of how rows are stored: slots, packing, positions. Raise it with whatever changes one of them for the same settings:
# states that lie in files are put back only where the scheme is the same.
SCHEME = 1


class SlidingWindowKVCache:
    """One layer's keys and values, in the place of mlx-lm's KVCache. Lossy once a window or bits cut something away.

    A token attends to the first `sinks` tokens and to the last `window - sinks` tokens, itself included
    (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453); without a window to all. That holds whatever calls a text is
    divided into. Up to `window` tokens it is what KVCache is, to the bit.

    `kv_bits`: 8 or 4 to store quantised rows; they are handed out dequantised, so a layer needs room for its window
    once while it computes. `positions`: how positions stay within the trained context, and `rotation`: where this
    layer's rows carry theirs. Without `positions` they count on as in any cache; a layer whose rows carry none has
    `positions` as its neighbours have, and no `rotation`.

    Memory: rows for `window` tokens, in steps of 256 until it has them all and never again. A call of T > 1 tokens
    that does not fit hands out `window + T` rows (and the sinks again for every step of the positions within it),
    which one layer after the other holds while it computes.
    """

    def __init__(
        self,
        window: int | None = None,
        sinks: int = 4,
        *,
        kv_bits: int | None = None,
        positions: Positions | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        KVSettings(window, sinks, kv_bits)  # raises WindowError
        self.window = window
        self.sinks = 0 if window is None else sinks
        self.kv_bits = kv_bits
        self.positions = None if window is None else positions
        self.rotation = None if self.positions is None else rotation
        self.seen = 0  # tokens, all of them
        self._packings: dict[str, Packing] = {}
        self._rows: dict[str, Packed] = {}  # "keys" and "values", once there are some
        self._back = 0  # all but the sinks stand this far back from their numbers

    @property
    def offset(self) -> int:
        """The position of the next token, for the model's rotation."""
        return self.seen - (0 if self.positions is None else self.positions.back(self.seen))

    @property
    def room(self) -> int | None:
        """Tokens that the next call may have; None for any number."""
        if self.positions is None or self.rotation is None or self.rotation.steady:
            return None
        return self.positions.room(self.seen)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take in `[B, H, T, D]` rows; all rows that the T tokens attend to between them, as `make_mask` has them."""
        start, stop = self.seen, self.seen + keys.shape[2]
        if not self._rows:
            self._packings = {
                "keys": Packing(keys.shape[3], self.kv_bits),
                "values": Packing(values.shape[3], self.kv_bits),
            }
        self._settle(start)
        new = {"keys": self._packings["keys"].pack(keys), "values": self._packings["values"].pack(values)}
        if not self._rows:
            self._rows = {part: empty_like(rows, 0) for part, rows in new.items()}
        self.seen = stop
        if self._stays(start, stop):
            self._put(start, stop, new)
            return self._unpacked({part: cut(rows, 0, self._count(stop)) for part, rows in self._rows.items()})
        return self._slide(start, stop, new)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        """Which of the rows that the next call of N tokens is handed each of them attends to, as mlx-lm's caches say.

        `window_size`: a window of the layer's own, which narrows this one.
        """
        start, stop = self.seen, self.seen + N
        if self._stays(start, stop):
            if self._count(stop) == stop:
                mask: mx.array | str | None = create_attention_mask(N, start, return_array, window_size)
                return mask
            if window_size is None:
                return None  # the window's rows, whatever their order
        assert self.window is not None, "without a window rows stay in their places"
        return window_mask(start, stop, self.window, self.sinks, self.positions, window_size)

    def size(self) -> int:
        """Tokens that are in the cache now."""
        return self._count(self.seen)

    def empty(self) -> bool:
        return not self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return sum(nbytes(rows) for rows in self._rows.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows as they are stored; 0 in an empty cache."""
        return sum(nbytes(rows) // max(rows[0].shape[2], 1) for rows in self._rows.values())

    def is_trimmable(self) -> bool:
        """Whether every token seen is still there: what the window has let go cannot come back."""
        return self._count(self.seen) == self.seen

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, or all; how many that were: 0, and no change, once it is not trimmable."""
        if not self.is_trimmable():
            return 0
        n = max(0, min(n, self.seen))
        self.seen -= n
        return n

    @property
    def keys(self) -> Any:
        """The stored keys: an array, or the arrays of quantised ones. Definitions tie graphs together by them."""
        return self._stored("keys")

    @keys.setter
    def keys(self, rows: Any) -> None:
        self._rows["keys"] = [rows] if isinstance(rows, mx.array) else list(rows)

    @property
    def values(self) -> Any:
        """The stored values, as `keys`."""
        return self._stored("values")

    @values.setter
    def values(self, rows: Any) -> None:
        self._rows["values"] = [rows] if isinstance(rows, mx.array) else list(rows)

    @property
    def content(self) -> tuple[Any, ...]:
        """What it has seen, in arrays, numbers and None, and nothing that its maker chose.

        Set, it is what a cache of the same settings and `scheme` has seen. The two share memory until one writes.
        """
        widths = [packing.width for packing in self._packings.values()] or None
        return self._rows.get("keys"), self._rows.get("values"), [self.seen, self._back], widths

    @content.setter
    def content(self, content: Sequence[Any]) -> None:
        keys, values, (self.seen, self._back), widths = content
        # a handle of its own for each array: rows are written in place, and whoever gave them may go on
        self._rows = {} if keys is None else {"keys": [*map(copy.copy, keys)], "values": [*map(copy.copy, values)]}
        parts = zip(("keys", "values"), widths or (), strict=False)
        self._packings = {part: Packing(width, self.kv_bits) for part, width in parts}

    @property
    def scheme(self) -> list[Any]:
        """How rows are stored beside the window, the sinks and the bits, as JSON values."""
        positions, rotation = self.positions, self.rotation
        return [
            SCHEME,
            positions and [positions.trained, positions.step],
            rotation and [rotation.part, rotation.dims, rotation.traditional, rotation.steady],
        ]

    @property
    def state(self) -> tuple[Any, ...]:
        """All there is of it, in arrays, numbers and None. `from_state` makes an equal one."""
        rotation, positions = self.rotation, self.positions
        return (
            self.content,
            [self.window, self.sinks, self.kv_bits],
            positions and [positions.trained, positions.step],
            rotation
            and [rotation.part == "values", rotation.dims, rotation.traditional, rotation.freqs, rotation.steady],
        )

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        content, (self.window, self.sinks, self.kv_bits), positions, rotation = state
        self.positions = None if positions is None else Positions(*positions)
        if rotation is not None:
            rotation = Rotation("values" if rotation[0] else "keys", *rotation[1:])
        self.rotation = rotation
        self.content = content

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> SlidingWindowKVCache:
        """A cache of the `state` of another one, also when that was stored and read again."""
        cache = cls()
        cache.state = state
        return cache

    @classmethod
    def merge(cls, caches: Sequence[SlidingWindowKVCache]) -> BatchSlidingWindowKVCache:
        """A batch of several texts for mlx-lm, of caches of one text each, which are not modified.

        Raises what BatchSlidingWindowKVCache does.
        """
        from mlxmoe.kv.batch import BatchSlidingWindowKVCache  # which is made of this class

        return BatchSlidingWindowKVCache(caches)

    def _count(self, seen: int) -> int:
        return seen if self.window is None else min(seen, self.window)

    def _stays(self, start: int, stop: int) -> bool:
        """Whether the tokens `start` to `stop` see stored rows in their places, none let go or moved between two."""
        if self.window is not None and stop > self.window and stop - start > 1:
            return False
        return self._epoch(start) == self._epoch(stop - 1)

    def _epoch(self, token: int) -> int:
        return 0 if self.positions is None else self.positions.epoch(token)

    def _slot(self, token: int) -> int:
        """The row of a token: by its number, so that it does not matter how it came there."""
        if self.window is None or token < self.window:
            return token
        return self.sinks + (token - self.sinks) % (self.window - self.sinks)

    def _settle(self, start: int) -> None:
        """Turn the rows behind the sinks to where tokens from number `start` on look for them."""
        back, stored = 0 if self.positions is None else self.positions.back(start), self._count(start)
        if self.rotation is not None and back != self._back and stored > self.sinks:
            packing, rows = self._packings[self.rotation.part], self._rows[self.rotation.part]
            recent = packing.unpack(cut(rows, self.sinks, stored))
            write(rows, self.sinks, packing.pack(self.rotation.moved(recent, self._back - back)))
        self._back = back

    def _put(self, start: int, stop: int, new: dict[str, Packed]) -> None:
        """Write the rows of tokens `start` to `stop` to their slots, which lie side by side."""
        needed = self._count(stop)
        for part, rows in self._rows.items():
            if rows[0].shape[2] < needed:
                room = self._count(-(-needed // KV_STEP) * KV_STEP)
                rows[:] = join(cut(rows, 0, start), empty_like(new[part], room - min(start, room)))
            write(rows, self._slot(start), new[part])

    def _slide(self, start: int, stop: int, new: dict[str, Packed]) -> tuple[mx.array, mx.array]:
        """Several tokens at once, of which the last ones see other rows than the first."""
        text = {part: join(self._in_order(part, start), new[part]) for part in new}
        if self._count(stop) == stop:
            self._put(start, stop, new)
        else:
            self._rows = {part: self._last_window(rows, stop) for part, rows in text.items()}
        keys, values = (
            mx.concatenate([*self._later_sinks(part, text[part], start, stop), rows], axis=2)
            for part, rows in zip(text, self._unpacked(text), strict=True)
        )
        # what is kept is made as soon as this layer computes: otherwise the rows of all layers would wait for it
        keys, values = mx.depends([keys, values], [*self._rows["keys"], *self._rows["values"]])
        return keys, values

    def _in_order(self, part: str, start: int) -> Packed:
        """The stored rows in the order of the text."""
        rows = self._rows[part]
        if self.window is None or start <= self.window:
            return cut(rows, 0, start)
        oldest = self._slot(start)
        return join(cut(rows, 0, self.sinks), cut(rows, oldest, self.window), cut(rows, self.sinks, oldest))

    def _later_sinks(self, part: str, text: Packed, start: int, stop: int) -> list[mx.array]:
        """The sinks once more for each later epoch in this call, as far on as its tokens should be further back."""
        later = range(1, self._epoch(stop - 1) - self._epoch(start) + 1)
        if self.positions is None or not self.sinks or not later:
            return []
        sinks = self._packings[part].unpack(cut(text, 0, self.sinks))
        if self.rotation is None or self.rotation.part != part:
            return [sinks] * len(later)
        return [self.rotation.moved(sinks, steps * self.positions.step) for steps in later]

    def _last_window(self, text: Packed, stop: int) -> Packed:
        """What is kept of `text`: each row in the slot of its token, in memory of its own."""
        assert self.window is not None, "without a window nothing is let go"
        recent, end = self.window - self.sinks, text[0].shape[2]
        turn = end - (stop - self.sinks) % recent  # from here on they come before the others
        kept = join(cut(text, 0, self.sinks), cut(text, turn, end), cut(text, end - recent, turn))
        return [mx.contiguous(part) for part in kept]

    def _unpacked(self, rows: dict[str, Packed]) -> tuple[mx.array, mx.array]:
        return self._packings["keys"].unpack(rows["keys"]), self._packings["values"].unpack(rows["values"])

    def _stored(self, part: str) -> Any:
        rows = self._rows.get(part)
        return rows[0] if rows is not None and len(rows) == 1 else rows
