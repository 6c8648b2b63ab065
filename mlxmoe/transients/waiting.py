"""What waits, to the end of a prefill chunk's pass, for the layers' states to be computed. Of deep models alone.

No layer wants the state of another, so MLX computes states when it comes to it, and until then keeps what they are
made from; and a state may be a view of all that it was cut from. That adds up from layer to layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.nn as nn

from mlxmoe.transients.caches import MakeCaches, count_states, state_bytes
from mlxmoe.transients.evaluation import Peak, peak_of
from mlxmoe.transients.graph import TracedChunk
from mlxmoe.transients.tracing import trace_chunk


class WaitingStates:
    """Predicts it for `model`, whose caches `make_caches` makes. Remembers what it simulated.

    The second half of the layers that a deep model is traced with shows what each state adds: with all experts in
    memory, and without a past, as otherwise the scores of an attention are so large that they hide it.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module], make_caches: MakeCaches) -> None:
        self._model = model
        self._modules = modules
        self._make_caches = make_caches
        self._each: dict[int, float] = {}
        self._held: dict[tuple[int, int], int] = {}

    def held(self, chunk: int, seen: int) -> int:
        """What the caches of all layers hold after a chunk that came after `seen` tokens."""
        if (chunk, seen) not in self._held:
            self._held[chunk, seen] = state_bytes(self._model, self._modules, chunk, seen, self._make_caches)
        return self._held[chunk, seen]

    def of(self, chunk: int, traced: TracedChunk, first: Peak | None) -> int:
        """Bytes for the states of the layers that `traced`, a graph of `chunk` tokens, leaves out.

        `first`: its peak, if it is of a text's first chunk with all experts in memory.
        """
        left = count_states(self._make_caches(self._model)) - traced.state_caches
        if left <= 0:
            return 0
        if chunk not in self._each:
            self._each[chunk] = self._simulated(chunk, None if first is None else (traced, first))
        return round(left * self._each[chunk])

    def _simulated(self, chunk: int, known: tuple[TracedChunk, Peak] | None) -> float:
        """Of one state. `known`: the graph of the whole, and its peak."""
        whole, peak = known or self._at(chunk, halved=False)
        half, half_peak = self._at(chunk, halved=True)
        more = whole.state_caches - half.state_caches
        grown = (peak.nbytes - peak.states_bytes) - (half_peak.nbytes - half_peak.states_bytes)
        return max(0, grown) / more if more else 0.0

    def _at(self, chunk: int, *, halved: bool) -> tuple[TracedChunk, Peak]:
        traced = trace_chunk(self._model, self._modules, {}, chunk, 0, self._make_caches, halved=halved)
        return traced, peak_of(traced)
