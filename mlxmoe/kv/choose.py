"""Which cache each layer of a model gets when a window or bits are asked for, and which definitions get none.

Layers that are bounded already (windows of their own, linear attention, state spaces, chunks) keep mlx-lm's caches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from mlxmoe.errors import UnsupportedModelError, WindowError
from mlxmoe.kv.layers import KVLayer, KVLayers, find_kv_layers, leaves_of
from mlxmoe.kv.positions import Positions
from mlxmoe.kv.settings import KVSettings
from mlxmoe.kv.window import SlidingWindowKVCache

logger = logging.getLogger(__name__)

# Definitions with several unbounded caches in a layer that the tests found to be right: two attentions one after the
# other. The others' second cache is for choosing keys, by their place in the cache (minimax_m3_vl) or with ties that
# the place decides (deepseek_v32, glm_moe_dsa), or they reach into the cache.
GROUPED = frozenset({"longcat_flash", "longcat_flash_ngram"})


@dataclass(frozen=True)
class KVChoice:
    """How a model's caches are made. `trained`: tokens of context that the model was made for, None if unknown."""

    settings: KVSettings
    layers: KVLayers
    trained: int | None

    @property
    def positions(self) -> Positions | None:
        """How positions stay within the trained context; None where they count on."""
        window = self.settings.window
        if window is None or not self.layers.movable or self.trained is None:
            return None
        return Positions.within(self.trained, window, self.settings.sinks)

    @property
    def endless(self) -> bool:
        """Whether a text may outgrow what the model was made for: its positions stay within that, or it has none."""
        return self.settings.window is not None and (self.positions is not None or self.layers.placeless)

    @property
    def settled_tokens(self) -> int:
        """Tokens after which every call attends to as many rows as the one before; 0 without a window."""
        positions = self.positions
        return max(self.settings.window or 0, 0 if positions is None else positions.trained)

    def caches(self, model: nn.Module) -> list[Any]:
        """New caches for one text: mlx-lm's own, the unbounded ones replaced where a window or bits are asked for."""
        caches = list(make_prompt_cache(model))
        if self.settings.lossless:
            return caches
        layers = iter(self.layers.layers)
        return [self._replaced(cache, layers) for cache in caches]

    def _replaced(self, cache: Any, layers: Iterator[KVLayer]) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(self._replaced(part, layers) for part in cache.caches))
        if type(cache) is not KVCache:
            return cache
        layer = next(layers)
        return SlidingWindowKVCache(
            self.settings.window,
            self.settings.sinks,
            kv_bits=self.settings.kv_bits,
            positions=self.positions,
            rotation=None if self.positions is None else layer.rotation,
        )


def room(caches: Iterable[Any]) -> int | None:
    """Tokens that the next call with `caches` may have; None for any number."""
    rooms = [
        leaf.room for leaf in leaves_of(caches) if isinstance(leaf, SlidingWindowKVCache) and leaf.room is not None
    ]
    return min(rooms, default=None)


def choose(model: nn.Module, settings: KVSettings, trained: int | None) -> KVChoice:
    """The caches of `model` for `settings`. Raises UnsupportedModelError for a definition that they would break.

    Raises WindowError for sinks that leave less of the trained context than its positions need to go back in steps.
    Logs a warning where positions cannot be kept within what the model was made for.
    """
    if settings.lossless:
        return KVChoice(settings, KVLayers(()), trained)
    layers = find_kv_layers(model)
    choice = KVChoice(settings, layers, trained)
    name = _definition(model)
    asked = " and ".join(
        f"{key}={value}" for key, value in (("window", settings.window), ("kv_bits", settings.kv_bits)) if value
    )
    if layers.others:
        raise UnsupportedModelError(
            f"{asked} cannot be had with {name}: its caches ({', '.join(layers.others)}) are of a kind of their own. "
            f"Load it without."
        )
    if layers.grouped and name not in GROUPED:
        raise UnsupportedModelError(
            f"{asked} cannot be had with {name}: its sparse attention chooses keys by where they are in the cache. "
            f"Load it without."
        )
    if settings.window is not None:
        _refuse_sinks(name, choice)
        _warn_of_positions(name, choice, settings.window)
    return choice


def _refuse_sinks(name: str, choice: KVChoice) -> None:
    if choice.positions is None:
        return
    sinks, trained = choice.settings.sinks, choice.positions.trained
    if sinks > (most := Positions.most_sinks(trained)):
        raise WindowError(
            f"sinks={sinks} are too many of the {trained} tokens that {name} was made for: the tokens after them "
            f"need an eighth of it. Lower sinks=: at most {most} can be had with this model."
        )


def _definition(model: nn.Module) -> str:
    """What mlx-lm calls the model's definition, also where a class of ours is mixed in before the model's own."""
    kind: type = getattr(model, "stock_class", type(model))
    return kind.__module__.rpartition(".")[2]


def _warn_of_positions(name: str, choice: KVChoice, window: int) -> None:
    if choice.trained is None:
        logger.warning("%s does not say what context it was made for: positions count on with the text.", name)
    elif choice.layers.fixed:
        logger.warning(
            "The positions of %s cannot be moved (%s): beyond the %s tokens it was made for they count on with the "
            "text, and it may lose the thread.", name, choice.layers.fixed, choice.trained,
        )  # fmt: skip
    elif choice.layers.movable and window > choice.trained:
        logger.warning(
            "window=%s is more than the %s tokens %s was made for: it may lose the thread.",
            window,
            choice.trained,
            name,
        )
