"""Which layers of a model keep all of a text's keys and values, and where their rows carry positions.

Found by listening to a forward pass that is never evaluated, not by names: what a rotary module returned and what a
cache is given as its keys or values is the very same object. Knows mlx-lm's caches and rotary modules, no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from mlxmoe.kv.positions import Rotation

BOUNDED = (RotatingKVCache, ArraysCache, ChunkedKVCache)  # mlx-lm's caches that keep no more than a layer wants


@dataclass(frozen=True)
class KVLayer:
    """One cache of a layer that keeps all of a text.

    `rotation`: where its rows carry positions. `fixed`: why they cannot be moved, "" where they can or where there
    are none.
    """

    rotation: Rotation | None
    fixed: str = ""


@dataclass(frozen=True)
class KVLayers:
    """A model's caches: those that keep all of a text, in order, and what else there is.

    `others`: names of cache types that are not mlx-lm's own. `grouped`: whether a layer has several unbounded caches.
    `elsewhere`: why positions must not move though every layer's own could, "" where they may.
    """

    layers: tuple[KVLayer, ...]
    others: tuple[str, ...] = ()
    grouped: bool = False
    elsewhere: str = ""

    @property
    def fixed(self) -> str:
        """Why the model's positions stay as the text has them; "" where they can move or nothing has any."""
        return next((layer.fixed for layer in self.layers if layer.fixed), self.elsewhere)

    @property
    def movable(self) -> bool:
        """Whether there are positions and all of them can be moved."""
        return not self.fixed and any(layer.rotation is not None for layer in self.layers)

    @property
    def placeless(self) -> bool:
        """Whether nothing that is kept carries a position."""
        return not self.fixed and all(layer.rotation is None for layer in self.layers)


def find_kv_layers(model: nn.Module) -> KVLayers:
    """Listen to one pass of `model` on two tokens, which is built and thrown away."""
    caches = list(make_prompt_cache(model))
    listener = _Listener()
    with listener.hearing(model):
        model(mx.zeros((1, 2), dtype=mx.int32), cache=[listener.over(cache) for cache in caches])
    leaves = leaves_of(caches)
    unbounded = [leaf for leaf in leaves if type(leaf) is KVCache]
    return KVLayers(
        layers=tuple(listener.heard.get(id(leaf), KVLayer(None, "a cache is not used")) for leaf in unbounded),
        others=tuple(sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (KVCache, *BOUNDED))})),
        grouped=any(sum(type(leaf) is KVCache for leaf in leaves_of([cache])) > 1 for cache in caches),
        elsewhere=listener.unheard(),
    )


def leaves_of(caches: Iterable[Any]) -> list[Any]:
    """Every single cache of `caches`, also where a layer has several."""
    return [leaf for one in caches for leaf in (leaves_of(one.caches) if isinstance(one, CacheList) else [one])]


class _Listener:
    """Notes which rotary modules ran before each cache was given its rows."""

    def __init__(self) -> None:
        self.heard: dict[int, KVLayer] = {}  # by the id of mlx-lm's cache
        self._turned: list[tuple[nn.Module, mx.array]] = []  # since a cache was last given rows
        self._asked = False  # for a position, since then

    @contextmanager
    def hearing(self, model: nn.Module) -> Iterator[None]:
        """Within this, rotary modules of `model` report what they return. Modifies it for so long."""
        kinds = [(module, type(module)) for module in model.modules() if _is_rotary(module)]
        try:
            for module, kind in kinds:
                module.__class__ = self._reporting(kind)
            yield
        finally:
            for module, kind in kinds:
                module.__class__ = kind

    def _reporting(self, kind: type) -> type:
        def call(module: nn.Module, *args: Any, **options: Any) -> Any:
            rows = kind.__call__(module, *args, **options)
            self._turned.append((module, rows))
            return rows

        return type(kind.__name__, (kind,), {"__call__": call})

    def over(self, cache: Any) -> Any:
        """`cache`, listened to."""
        if isinstance(cache, CacheList):
            return CacheList(*(self.over(part) for part in cache.caches))
        return _Overheard(cache, self) if hasattr(cache, "update_and_fetch") else cache

    def asked(self) -> None:
        self._asked = True

    def given(self, cache: Any, keys: mx.array, values: mx.array) -> None:
        self.heard[id(cache)] = self._judge(keys, values)
        self._turned, self._asked = [], False

    def unheard(self) -> str:
        """What used positions after the last cache had its rows."""
        return f"{type(self._turned[-1][0]).__name__} rotates what is in no cache" if self._turned else ""

    def _judge(self, keys: mx.array, values: mx.array) -> KVLayer:
        modules = {id(module): module for module, _ in self._turned}
        if not modules:
            return KVLayer(None, "positions are used in a way of its own" if self._asked else "")
        if len(modules) > 1:
            return KVLayer(None, "several rotations meet in one layer, or one without a cache")
        (module,) = modules.values()
        for part, rows in (("keys", keys), ("values", values)):
            if any(rows is turned for _, turned in self._turned):
                rotation = Rotation.of(module, part)  # type: ignore[arg-type]
                if rotation is not None:
                    return KVLayer(rotation)
        return KVLayer(None, f"what {type(module).__name__} rotated is changed before it is cached")


class _Overheard:
    """Stands for one of mlx-lm's caches and tells a listener what it is asked and given."""

    def __init__(self, cache: Any, listener: _Listener) -> None:
        self._cache = cache
        self._listener = listener

    @property
    def offset(self) -> Any:
        self._listener.asked()
        return self._cache.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self._listener.given(self._cache, keys, values)
        return self._cache.update_and_fetch(keys, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _is_rotary(module: nn.Module) -> bool:
    """nn.RoPE, mlx-lm's variants, and whatever else a definition calls so; a block that contains one is none."""
    name = type(module).__name__.lower()
    return ("rope" in name or "rotary" in name) and not module.children()
