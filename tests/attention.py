"""One attention layer without a model, over any cache, and what it should give: every pair of tokens by itself.

Legend: N tokens of a text, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

HEADS, KV_HEADS, WIDTH = 4, 2, 32


@dataclass
class Attention:
    """A text's queries, keys and values before rotation, `[1, H, N, D]`, and the module that rotates them."""

    rope: Any
    queries: mx.array
    keys: mx.array
    values: mx.array

    @classmethod
    def of(cls, tokens: int, rope: Any, seed: int = 0) -> Attention:
        key = mx.random.key(seed)
        shapes = [(1, heads, tokens, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        return cls(rope, *(mx.random.normal(s, key=k) for s, k in zip(shapes, mx.random.split(key, 3), strict=True)))

    def run(self, cache: Any, cuts: Iterable[int]) -> mx.array:
        """`[H, N, D]` as a definition of mlx-lm computes it, in calls that end at `cuts`."""
        parts, begin = [], cache.seen if hasattr(cache, "seen") else cache.offset
        for end in [*cuts, self.keys.shape[2]]:
            if end > begin:
                parts.append(self.call(cache, begin, end))
                begin = end
        return mx.concatenate(parts, axis=1)

    def call(self, cache: Any, begin: int, end: int) -> mx.array:
        queries, keys, values = (rows[..., begin:end, :] for rows in (self.queries, self.keys, self.values))
        mask = create_attention_mask(mx.zeros((1, end - begin, 1)), cache)
        queries = self.rope(queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
        out = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=WIDTH**-0.5, mask=mask)
        mx.eval(out, cache.state)
        return out[0]

    def expected(self, window: int, sinks: int, trained: int = 2**30, step: int = 1) -> mx.array:
        """By the definition: each query turned by its distance to each key, the keys not at all."""
        turned_keys = self.rope(self.keys.transpose(2, 1, 0, 3), offset=0)[:, :, 0]  # one at a time: all at 0
        rows = []
        for token in range(self.keys.shape[2]):
            place = token if token < trained else trained - step + (token - trained) % step
            seen = [t for t in range(token + 1) if t < sinks or token - t < window - sinks]
            away = [place - t if t < sinks <= token else token - t for t in seen]
            assert min(away) >= 0, "no token attends to a later one"
            query = mx.broadcast_to(self.queries[:, :, token : token + 1], (1, HEADS, max(away) + 1, WIDTH))
            turned = self.rope(query, offset=0)[0][:, mx.array(away)]  # [H, seen, D]
            keys, values = (
                mx.repeat(rows_of, HEADS // KV_HEADS, axis=1)
                for rows_of in (turned_keys[mx.array(seen)], self.values[0].swapaxes(0, 1)[mx.array(seen)])
            )
            weights = mx.softmax((turned * keys.swapaxes(0, 1)).sum(-1) * WIDTH**-0.5, axis=-1)
            rows.append((weights[..., None] * values.swapaxes(0, 1)).sum(1))
        return mx.stack(rows, axis=1)
