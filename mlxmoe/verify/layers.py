"""For models too large to hold whole: each MoE layer by itself, on the inputs that it really had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.utils import load_model

from mlxmoe.decode import Decoder
from mlxmoe.experts.layer import ExpertStream, Forward
from mlxmoe.experts.switch import switch_modules
from mlxmoe.loading import LoadedModel, load_folder
from mlxmoe.opening import open_folder
from mlxmoe.verify.logits import CHUNK_TOKENS
from mlxmoe.verify.report import VerifyRow, difference, expert_sizes, probe_tokens

PREFILL_TOKENS = 65
DECODE_TOKENS = 8


@dataclass(frozen=True)
class _Call:
    """What a layer was given and what it made of it."""

    x: mx.array
    indices: mx.array
    out: mx.array


class _Recorder:
    """Stands in for a layer's ExpertStream and keeps what passes through."""

    def __init__(self, stream: ExpertStream) -> None:
        self.stream = stream
        self.passes = stream.passes
        self.calls: list[_Call] = []

    def __call__(self, x: mx.array, indices: mx.array, forward: Forward) -> mx.array:
        out = self.stream(x, indices, forward)
        mx.eval(x, indices, out)
        self.calls.append(_Call(x, indices, out))
        return out


def compare_layers(folder: Path, budget: int, trust: bool, add: Callable[[VerifyRow], None]) -> None:
    """Tell `add` a row a layer, at one token's need and at half of the experts or of `budget`."""
    floor, total = expert_sizes(open_folder(folder, trust_remote_code=trust))
    sizes = {"top_k": floor}
    if (more := min(total // 2, budget // 2)) > floor:
        sizes[f"{more / total:.0%}"] = more
    for label, size in sizes.items():
        _compare_one(folder, trust, label, size, add)
        mx.clear_cache()


def _compare_one(folder: Path, trust: bool, label: str, size: int, add: Callable[[VerifyRow], None]) -> None:
    """Each layer's record against the stock layer, whose experts are read, used and dropped before the next."""
    loaded = load_folder(folder, experts=size, memory_bytes=2**62, trust_remote_code=trust)
    try:
        recorded = _record(loaded)
        stock = switch_modules(load_model(folder, lazy=True, trust_remote_code=trust)[0])
        for path, calls in recorded.items():
            bank = loaded.experts.streams[path].bank
            differing, largest, values = 0, 0.0, 0
            for call in calls:
                expected = stock[path](call.x, call.indices)
                mx.eval(expected)
                count, gap = difference(call.out, expected)
                differing, largest, values = differing + count, max(largest, gap), values + call.out.size
            _drop_weights(stock[path])
            counters = bank.counters
            slots = (bank.slots, bank.slots)
            add(VerifyRow(label, slots, path, values, differing, largest, 0.0, counters.misses, counters.evictions))
    finally:
        loaded.experts.close()


def _record(loaded: LoadedModel) -> dict[str, list[_Call]]:
    """What each streamed layer did in a prefill and in a few decode steps."""
    modules = switch_modules(loaded.model)
    recorders = {path: _Recorder(stream) for path, stream in loaded.experts.streams.items()}
    decoder = Decoder(loaded.model, loaded.experts, chunk_tokens=CHUNK_TOKENS)
    for path, recorder in recorders.items():
        modules[path].expert_stream = recorder
    try:
        cache = decoder.new_cache()
        decoder.prefill(probe_tokens(loaded.vocab_size, PREFILL_TOKENS), cache)
        for token in probe_tokens(loaded.vocab_size, DECODE_TOKENS):
            decoder.logits([token], cache)
    finally:
        for path, recorder in recorders.items():
            modules[path].expert_stream = recorder.stream
    return {path: recorder.calls for path, recorder in recorders.items()}


def _drop_weights(module: nn.Module) -> None:
    module.update(tree_map(lambda _: mx.zeros(()), module.parameters()))
