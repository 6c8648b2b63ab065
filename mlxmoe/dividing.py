"""How the memory is divided for a model that was opened: its sizes, and what its prefill is predicted to need."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

import mlx.core as mx
import mlx_lm

from mlxmoe.memory.plan import KV_STEP, Plan, make_plan
from mlxmoe.opening import OpenedModel
from mlxmoe.transients import PrefillTransients
from mlxmoe.transients.kept import KeptPredictions
from mlxmoe.transients.sources import code_digest
from mlxmoe.transients.waiting import WaitingStates
from mlxmoe.version import __version__


def divide_memory(
    opened: OpenedModel,
    room: PrefillRoom,
    *,
    experts: int | float | str,
    memory_bytes: int,
    reserve_bytes: int = 0,
    context: int | None = None,
    chunk_tokens: int | None = None,
) -> Plan:
    """The plan that a model is loaded with. `room`: what its prefill takes.

    `context`: tokens that must fit, None for the model's own or as much of it as fits. `chunk_tokens`: the most of a
    prefill chunk. Raises MemoryBudgetError.
    """
    bound = None if opened.kv_choice.endless else opened.model_context
    plan = make_plan(
        opened.layers,
        trunk_bytes=opened.trunk_bytes,
        kv=opened.kv,
        prefill=room.at_most,
        resident_prefill=room.resident,
        context=context,
        model_context=bound,
        experts=experts,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        chunk_tokens=chunk_tokens,
    )
    return replace(plan, model_context=opened.model_context)


class PrefillRoom:
    """Room for the activations of one prefill chunk, of its tokens and the context. Remembers what it computed.

    That of the last chunk, which attends to the most tokens, taken as a whole one. Without a context: of a chunk
    after as many tokens as any later one attends to. A context manager, which keeps what it computed for later loads
    of the same model: so that they ask for the same, many chunks are taken for some more.
    """

    def __init__(self, opened: OpenedModel) -> None:
        make_caches = opened.kv_choice.caches
        half = {layer.path: max(layer.top_k, layer.num_experts // 2) for layer in opened.layers}
        self._settled_tokens = opened.kv_choice.settled_tokens
        self._kept = KeptPredictions(_subject(opened))
        waiting = WaitingStates(opened.model, opened.modules, make_caches)
        self._half, self._resident = (
            PrefillTransients(opened.model, opened.modules, opened.kv, slots, make_caches, waiting)
            for slots in (half, None)
        )

    def __enter__(self) -> PrefillRoom:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept.save()

    def resident(self, chunk_tokens: int, context: int | None) -> int:
        """With all experts in memory."""
        return self._of("resident", self._resident, chunk_tokens, context)

    def at_most(self, chunk_tokens: int, context: int | None) -> int:
        """However the experts are resized: with half of them in slots or with all, whichever is more."""
        half = self._of("half", self._half, chunk_tokens, context)
        return max(self.resident(chunk_tokens, context), half)

    def _of(self, slots: str, transients: PrefillTransients, chunk: int, context: int | None) -> int:
        if context is None:
            seen = -(-self._settled_tokens // chunk) * chunk
        else:
            prompt = context - 1  # the last token is no chunk's
            seen = (_in_eighths(max(1, -(-prompt // chunk))) - 1) * chunk
        if seen > KV_STEP:  # there caches grow, and a layer's old rows lie beside the new ones
            seen = -(-seen // KV_STEP) * KV_STEP
        return self._kept.of(f"{slots}, {chunk} after {seen}", lambda: transients.of(chunk, seen))


def _in_eighths(count: int) -> int:
    """`count` or somewhat more: eight values from each power of two to the next.

    A context that is cut to the memory is another one at every load.
    """
    step = max(1, (1 << (count - 1).bit_length()) // 16)
    return -(-count // step) * step


def _subject(opened: OpenedModel) -> Any:
    """Everything that the predictions for a model depend on; None where that cannot be told."""
    code = None if opened.config.get("model_file") else code_digest(opened.classes)
    if code is None:  # a definition of the user's own
        return None
    return {
        "versions": [__version__, mx.__version__, mlx_lm.__version__],  # type: ignore[attr-defined]  # not in its stubs
        "code": code,
        "device": [str(mx.default_device()), mx.metal.is_available()],
        "config": json.dumps(opened.config, sort_keys=True, default=str),
        "weights": opened.shapes_digest,
        "caches": [asdict(opened.kv_choice.settings), asdict(opened.kv)],
    }
