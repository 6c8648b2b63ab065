"""What a prefill chunk needs in memory beside weights and KV cache, predicted from the model's own graph.

A chunk's pass is built as the model builds it, and never evaluated; a simulation of MLX's evaluation then says how
many bytes are alive at once. Knows no budget: how much there may be is the plan's business.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxmoe.errors import brief
from mlxmoe.experts.switch import LINEAR_TYPES
from mlxmoe.memory.plan import KVBytes
from mlxmoe.transients.caches import MakeCaches, has_states
from mlxmoe.transients.evaluation import peak_of
from mlxmoe.transients.graph import TracedChunk
from mlxmoe.transients.tracing import trace_chunk
from mlxmoe.transients.waiting import WaitingStates

logger = logging.getLogger(__name__)

# Definitions that loop over the tokens have graphs that grow with them: theirs are small ones, and extrapolated.
SMALL_TOKENS = (32, 64)
LOOPS = 1.2  # nodes of the larger small graph over those of the smaller, from which on there is a loop


class Prediction(NamedTuple):
    """Bytes, and whether they were simulated: what is estimated may be so by some passing trouble alone."""

    nbytes: int
    simulated: bool


class _Simulated(NamedTuple):
    """The most bytes alive during a chunk's pass, and the nodes of its graph."""

    nbytes: int
    nodes: int


class PrefillTransients:
    """Predicts the bytes that prefill needs above trunk, banks and KV cache. Evaluates no weight.

    `modules`: those with routed experts by their path; `slots`: of each layer, fewer than its experts where it
    streams; all resident where None. `kv`: what the caches take that `make_caches` makes for the model. `waiting`: of
    this model, to share what it remembers. Remembers what it simulated: the next question may need the same.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        kv: KVBytes,
        slots: Mapping[str, int] | None = None,
        make_caches: MakeCaches = make_prompt_cache,
        waiting: WaitingStates | None = None,
    ) -> None:
        self._model = model
        self._modules = modules
        self._kv = kv
        self._slots = slots or {}
        self._make_caches = make_caches
        self._waiting = waiting or WaitingStates(model, modules, make_caches)
        self._simulations: dict[tuple[int, int], _Simulated] = {}

    def of(self, chunk: int, seen: int) -> Prediction:
        """Bytes above trunk, banks and the KV cache after it, for a pass of `chunk` tokens after `seen` others."""
        try:
            return Prediction(max(0, self._simulated(chunk, seen) - self._kv.of(seen + chunk)), True)
        except Exception as error:  # what MLX cannot export, or a definition that wants values while it is built
            logger.debug("No graph of a prefill chunk, so its size is estimated: %s", brief(error))
            return Prediction(self._estimated(chunk, seen + chunk), False)

    def _simulated(self, chunk: int, seen: int) -> int:
        """The most bytes alive above the weights during a pass of `chunk` tokens after `seen` others."""
        if chunk >= 2 * max(SMALL_TOKENS) and has_states(self._model):
            small, large = (self._at(tokens, 0) for tokens in SMALL_TOKENS)
            if large.nodes > LOOPS * small.nodes:
                return self._extrapolated(chunk, seen)
        return self._at(chunk, seen).nbytes

    def _extrapolated(self, chunk: int, seen: int) -> int:
        """Of what is linear in the chunk's tokens, in those seen before it, and in both together."""
        alone = self._along_chunk(chunk, 0)
        past = 4 * max(SMALL_TOKENS)
        return round(alone + (self._along_chunk(chunk, past) - alone) * seen / past) if seen else round(alone)

    def _along_chunk(self, chunk: int, seen: int) -> float:
        small, large = SMALL_TOKENS
        low, high = self._at(small, seen).nbytes, self._at(large, seen).nbytes
        return high + (high - low) / (large - small) * (chunk - large)

    def _at(self, chunk: int, seen: int) -> _Simulated:
        if (chunk, seen) not in self._simulations:
            traced = trace_chunk(self._model, self._modules, self._slots, chunk, seen, self._make_caches)
            self._simulations[chunk, seen] = _Simulated(self._peak(traced, chunk, seen), len(traced.nodes))
        return self._simulations[chunk, seen]

    def _peak(self, traced: TracedChunk, chunk: int, seen: int) -> int:
        peak = peak_of(traced)
        if traced.left_out is None:
            return peak.nbytes
        # Deep models are alike from layer to layer: of those left out, caches and small outputs add up.
        kept = traced.left_out * max((step.kept_bytes for step in traced.steps), default=0)
        states = self._waiting.held(chunk, seen)
        more = states / traced.state_bytes - 1 if traced.state_bytes else 0.0
        first = peak if not seen and not self._slots else None
        return peak.nbytes + round(peak.states_bytes * more) + kept + self._waiting.of(chunk, traced, first)

    def _estimated(self, chunk: int, context: int) -> int:
        """Too much rather than too little: routed activations of the widest layer, and attention scores, twice."""
        widths = [0]
        for module in self._modules.values():
            linears = [child for child in module.children().values() if isinstance(child, LINEAR_TYPES)]
            experts = max(linear.num_experts for linear in linears)
            width = sum(linear.output_dims for linear in linears) + 3 * linears[0].input_dims
            widths.append(min(experts, MOST_TOP_K) * width)
        heads = _attention_heads(self._model)
        return 2 * chunk * 4 * (max(widths) + 3 * heads * context)


MOST_TOP_K = 8  # of most models: what is estimated need not be more exact


def _attention_heads(model: nn.Module) -> int:
    """As the definition's arguments say, or what most models have."""
    args: Any = getattr(model, "args", None)
    sources = [args, getattr(args, "text_config", None)]
    for source in sources:
        heads = source.get("num_attention_heads") if isinstance(source, dict) else None
        heads = heads or getattr(source, "num_attention_heads", None)
        if isinstance(heads, int):
            return heads
    return 32
