"""What a model asks of a machine for each token: bytes, operations, parameters. Reads no weight, knows no rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlxmoe.experts.switch import expert_arrays
from mlxmoe.kv.layers import leaves_of
from mlxmoe.kv.window import SlidingWindowKVCache
from mlxmoe.memory.plan import Plan
from mlxmoe.opening import OpenedModel
from mlxmoe.tuning.roofline import HitCurve, Prompt, Step
from mlxmoe.tuning.wanted import Wanted


@dataclass(frozen=True, slots=True)
class Workload:
    """What a model asks for. `params`, `active_params`: all of them, and those that one token uses.

    `computing_params`: of the active ones, those that are multiplied with: no embeddings. `step_trunk_bytes`: of the
    trunk, what a decoded token reads: all but embeddings that are looked up. `pair_flops`: operations for each pair
    of a token and one that it attends to, over all layers that attend to everything. `window`: tokens that those
    attend to at most.
    """

    opened: OpenedModel
    params: int
    active_params: int
    computing_params: int
    step_trunk_bytes: int
    pair_flops: int
    window: int | None

    @classmethod
    def of(cls, opened: OpenedModel) -> Workload:
        experts = {path: _expert_params(module) for path, module in opened.modules.items()}
        params = sum(_params(module) for module in _owners(opened.model))
        asked = sum(experts[layer.path] * layer.top_k // layer.num_experts for layer in opened.layers)
        active = params - sum(experts.values()) + asked
        looked_up = _looked_up(opened.model, opened.vocab_size)
        return cls(
            opened=opened,
            params=params,
            active_params=active,
            computing_params=active - sum(_params(module) for module in looked_up),
            step_trunk_bytes=opened.trunk_bytes - sum(_nbytes(module) for module in looked_up),
            pair_flops=_pair_flops(opened),
            window=opened.kv_choice.settings.window,
        )

    @property
    def floor_bytes(self) -> int:
        """What one token's experts take."""
        return sum(layer.floor_bytes for layer in self.opened.layers)

    def hit_rate(self, plan: Plan, hits: Mapping[str, HitCurve]) -> float | None:
        """Of all lookups, by bytes; None for a model without experts. `hits`: of each layer's path."""
        return self.hit_rate_of(plan, hits, self._alone())

    def hit_rate_of(self, plan: Plan, hits: Mapping[str, HitCurve], distinct: Mapping[str, float]) -> float | None:
        """The same of a step that wants `distinct` experts in each layer."""
        if not self.opened.layers:
            return None
        missing = sum(size for _, size in self._missing(plan, hits, distinct))
        return 1 - missing / self._bytes_of(distinct)

    def step(self, plan: Plan, hits: Mapping[str, HitCurve], tokens: int) -> Step:
        """One decoded token after `tokens` others."""
        return self.step_of(plan, hits, tokens, self._alone())

    def step_of(
        self,
        plan: Plan,
        hits: Mapping[str, HitCurve],
        tokens: int,
        distinct: Mapping[str, float],
        texts: int = 1,
    ) -> Step:
        """One pass that decodes a token of each of `texts`, after `tokens` others.

        They want `distinct` experts in each layer between them; `hits`: of those. Trunk and experts are read once for
        all, each KV cache for its own text. What one text computes takes no time beside what is read for it.
        """
        missing = list(self._missing(plan, hits, distinct))
        kv_bytes = texts * self.opened.kv.of(tokens)
        flops = 2.0 * self.computing_params + self.pair_flops * min(tokens, self.window or tokens)
        return Step(
            resident_bytes=self.step_trunk_bytes + self._bytes_of(distinct) + kv_bytes,
            layers=len(self.opened.model.layers),
            missing_bytes=sum(size for _, size in missing),
            misses=sum(count for count, _ in missing),
            syncs=_streaming(self.opened, plan),
            kv_bytes=kv_bytes,
            flops=texts * flops if texts > 1 else 0.0,
        )

    def distinct(self, wanted: Mapping[str, Wanted], texts: int) -> dict[str, float]:
        """How many experts of each layer `texts` want between them. `wanted`: of each layer's path."""
        return {layer.path: wanted[layer.path](texts) for layer in self.opened.layers}

    def prompt(self, plan: Plan, tokens: int) -> Prompt:
        """A prompt of `tokens`. Each chunk reads what it wants and is in no slot; it wants nearly all of them."""
        chunks = -(-tokens // plan.chunk_tokens)
        chunk = min(tokens, plan.chunk_tokens)
        read = 0.0
        for layer in self.opened.layers:
            wanted = 1 - (1 - layer.top_k / layer.num_experts) ** chunk  # were they drawn at random
            read += wanted * (1 - plan.slots[layer.path] / layer.num_experts) * layer.nbytes
        pairs = tokens * min(tokens / 2, self.window or tokens)
        return Prompt(
            flops=2.0 * self.computing_params * tokens + self.pair_flops * pairs,
            read_bytes=read * chunks,
            chunks=chunks,
            syncs=_streaming(self.opened, plan),
        )

    def _alone(self) -> dict[str, float]:
        return {layer.path: float(layer.top_k) for layer in self.opened.layers}

    def _bytes_of(self, distinct: Mapping[str, float]) -> float:
        return sum(distinct[layer.path] * layer.expert_bytes for layer in self.opened.layers)

    def _missing(
        self, plan: Plan, hits: Mapping[str, HitCurve], distinct: Mapping[str, float]
    ) -> Iterator[tuple[float, float]]:
        """How many of its experts a step misses in each layer that streams, and their bytes.

        No fewer than it wants beyond the slots: those cannot have been there.
        """
        for layer in self.opened.layers:
            slots, wants = plan.slots[layer.path], distinct[layer.path]
            if slots < layer.num_experts:
                misses = max(wants - slots, wants * (1 - hits[layer.path](slots / layer.num_experts)))
                yield misses, misses * layer.expert_bytes


def _streaming(opened: OpenedModel, plan: Plan) -> int:
    return sum(plan.slots[layer.path] < layer.num_experts for layer in opened.layers)


def _owners(model: nn.Module) -> Iterator[nn.Module]:
    """Every module that holds arrays of its own."""
    return (m for m in model.modules() if any(isinstance(value, mx.array) for value in m.values()))


def _params(module: Any) -> int:
    """A module's own parameters: packed ones by what they stand for, without scales and offsets."""
    own = {key: value for key, value in module.items() if isinstance(value, mx.array) and not key.startswith("_")}
    if "scales" not in own:
        return sum(value.size for value in own.values())
    weight: int = own["weight"].size * own["weight"].itemsize * 8 // module.bits
    return weight + (own["bias"].size if "bias" in own else 0)


def _expert_params(module: nn.Module) -> int:
    arrays = expert_arrays(module)
    names = {name.rpartition(".")[0] for name in arrays}
    return sum(_params(module[name]) for name in names)


def _nbytes(module: nn.Module) -> int:
    return sum(value.nbytes for value in module.values() if isinstance(value, mx.array))


def _looked_up(model: nn.Module, vocab_size: int) -> list[nn.Module]:
    """Embeddings of which a token reads one row: all, but for one that serves as the head too."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)]
    heads = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and module["weight"].shape[0] == vocab_size
    ]
    if heads:
        return tables
    tied = next((module for module in tables if module["weight"].shape[0] == vocab_size), None)
    return [module for module in tables if module is not tied]


def _pair_flops(opened: OpenedModel) -> int:
    """A product of query and key and one of weight and value, two operations an item, in each layer and head."""
    text = opened.config.get("text_config")
    config = {**opened.config, **(text if isinstance(text, dict) else {})}

    def number(*keys: str) -> int:
        found = (config.get(key) for key in keys)
        return next((value for value in found if isinstance(value, int) and value > 0), 0)

    heads = number("num_attention_heads", "n_heads", "n_head") or 32
    width = number("head_dim") or number("hidden_size", "n_embd") // heads
    if config.get("kv_lora_rank"):
        key_width = number("qk_nope_head_dim") + number("qk_rope_head_dim") or width
        widths = key_width + (number("v_head_dim") or width)
    else:
        widths = 2 * width
    whole = (KVCache, QuantizedKVCache, SlidingWindowKVCache)
    caches = leaves_of(opened.kv_choice.caches(opened.model))
    return 2 * heads * widths * sum(isinstance(cache, whole) for cache in caches)
