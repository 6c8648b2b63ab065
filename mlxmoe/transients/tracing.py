"""The graph of one prefill chunk, as the model builds it, with the points where a streaming layer evaluates.

mlx's export hands over every primitive with its shapes and evaluates nothing, as long as everything that holds data
is an input: tokens, caches, weights. Knows nothing of how a graph is evaluated.

Legend: T tokens, K experts a token (top_k), E experts, D width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxmoe.experts.policy import wave_size
from mlxmoe.experts.switch import mixed
from mlxmoe.transients.caches import MakeCaches, arrays_of, count_states, put_arrays, seen_caches, states_of
from mlxmoe.transients.few_layers import few_layers
from mlxmoe.transients.graph import Node, Step, TracedChunk, Value


def trace_chunk(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    slots: Mapping[str, int],
    chunk: int,
    seen: int,
    make_caches: MakeCaches,
    *,
    halved: bool = False,
) -> TracedChunk:
    """The graph of `chunk` tokens after `seen` others. Leaves `model` as it was.

    `modules`: those with routed experts; `slots`: of those that stream; `make_caches`: of the model; `halved`: with
    half of the layers that a deep model is traced with. Raises whatever MLX or the definition does where there is no
    graph to be had.
    """
    with few_layers(model, halved) as short:
        try:
            traced = _trace(model, modules, slots, chunk, seen, make_caches)
        except Exception:
            if not short:
                raise
            traced = None
    if traced is None:  # a definition that counts on all its layers
        return _trace(model, modules, slots, chunk, seen, make_caches)
    if short:
        streams = sum(slots.get(path, _num_experts(m)) < _num_experts(m) for path, m in modules.items())
        traced.left_out = streams - len(traced.steps)
    return traced


def _trace(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    slots: Mapping[str, int],
    chunk: int,
    seen: int,
    make_caches: MakeCaches,
) -> TracedChunk:
    caches = seen_caches(make_caches(model), model, modules, seen, chunk)
    prior = arrays_of(caches)
    homes = [(m, key) for m in model.modules() for key, value in m.items() if isinstance(value, mx.array)]
    weights = [home[key] for home, key in homes]
    calls: list[_Call] = []
    reading = _Reading(len(prior))
    state_sizes: list[int] = []

    def run(tokens: mx.array, *inputs: mx.array) -> list[mx.array]:
        put_arrays(caches, iter(inputs[: len(prior)]))
        for (home, key), weight in zip(homes, inputs[len(prior) :], strict=True):
            home[key] = weight
        calls.clear()
        model(tokens, cache=caches)
        states = states_of(caches)
        state_sizes[:] = [state.nbytes for state in states]
        return [array for call in calls for array in (call.indices, *call.parts, call.out)] + states

    with _streaming(modules, slots, calls), _exportable():
        try:
            mx.export_function(reading, run, mx.zeros((1, chunk), dtype=mx.int32), *prior, *weights)
        finally:
            for (home, key), weight in zip(homes, weights, strict=True):
                home[key] = weight
    return reading.traced(calls, sum(state_sizes), count_states(caches))


class _Reading:
    """Reads an export entry by entry, so that none is kept: very many objects at once have Python look for cycles."""

    def __init__(self, prior: int) -> None:
        self.nodes: list[Node] = []
        self.prior: list[Value] = []
        self.outputs: list[str] = []
        self._count = prior
        self._values: dict[str, Value] = {}

    def __call__(self, entry: dict[str, Any]) -> None:
        match entry["type"]:
            case "primitive":
                inputs, made = map(self._value, entry["inputs"]), map(self._value, entry["outputs"])
                arguments = entry.get("arguments", ())
                self.nodes.append(Node(entry["name"], tuple(inputs), tuple(made), arguments))
            case "inputs":
                self.prior = [self._value(one) for one in entry["inputs"][1 : 1 + self._count]]
            case "outputs":
                self.outputs = [name for name, _, _ in entry["outputs"]]

    def _value(self, entry: tuple[str, Sequence[int], mx.Dtype]) -> Value:
        name, shape, dtype = entry
        if (known := self._values.get(name)) is None:
            known = self._values[name] = Value(name, tuple(shape), dtype.size)
        return known

    def traced(self, calls: Sequence[_Call], sizes: int, state_caches: int) -> TracedChunk:
        """The chunk's graph, with the steps of `calls`. `sizes`: bytes of the states after it, in `state_caches`."""
        outputs, steps = list(self.outputs), []
        for call in calls:
            count = len(call.parts)
            indices, *parts, out = outputs[: count + 2]
            del outputs[: count + 2]
            steps.append(Step(indices, tuple(parts), out, call.out_bytes))
        return TracedChunk(self.nodes, self.prior, outputs, sizes, state_caches, steps)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a streaming layer while the graph is built."""

    indices: mx.array
    parts: list[mx.array]
    out: mx.array
    out_bytes: int


class _Tracing:
    """Mixed in before the stock class: the graph that `ExpertStream` makes, with nothing in the slots."""

    trace_slots: int
    trace_calls: list[_Call]

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        forward: Callable[[mx.array, mx.array], mx.array] = super().__call__  # type: ignore[misc]
        counts = _pairs_of_waves(indices.size, _num_experts(self), self.trace_slots)
        if len(counts) == 1:
            out = forward(x, mx.zeros(indices.shape, dtype=indices.dtype))
            self.trace_calls.append(_Call(indices, [], out, out.nbytes))
            return out
        tokens = x.reshape(-1, x.shape[-1])
        parts = [
            forward(tokens[mx.zeros((n,), dtype=mx.int32)], mx.zeros((n, 1), dtype=indices.dtype)) for n in counts
        ]
        order = mx.argsort(mx.zeros((indices.size,), dtype=mx.int32))
        rows = mx.concatenate([part.squeeze(-2) for part in parts])
        out = rows[order].reshape(*indices.shape, -1)
        self.trace_calls.append(_Call(indices, parts, out, out.nbytes))
        return out


def _pairs_of_waves(pairs: int, experts: int, slots: int) -> list[int]:
    """How many (token, expert) pairs are computed at once of a chunk that wants all experts alike.

    That is as many waves as `plan_waves` cuts as fit the bank beside the one that is read.
    """
    wanted = min(experts, pairs)
    if wanted <= slots:
        return [pairs]
    step = max(1, slots - wave_size(slots))
    waves = [min(step, wanted - start) for start in range(0, wanted, step)]
    ends = [pairs * sum(waves[: n + 1]) // wanted for n in range(len(waves))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@contextmanager
def _streaming(modules: Mapping[str, nn.Module], slots: Mapping[str, int], calls: list[_Call]) -> Iterator[None]:
    """Within this context, layers with fewer slots than experts build a streaming layer's graph and note it."""
    stock = {path: type(m) for path, m in modules.items() if slots.get(path, _num_experts(m)) < _num_experts(m)}
    try:
        for path, kind in stock.items():
            modules[path].__class__ = mixed(_Tracing, kind)
            modules[path].__dict__.update(trace_slots=slots[path], trace_calls=calls)
        yield
    finally:
        for path, kind in stock.items():
            modules[path].__class__ = kind
            for name in ("trace_slots", "trace_calls"):
                modules[path].__dict__.pop(name, None)


_ONE_AT_A_TIME = threading.Lock()  # for MLX's functions are the whole process's


@contextmanager
def _exportable() -> Iterator[None]:
    """Within this context and thread, operations that MLX cannot export are others that take the same memory.

    One thread at a time: two that replaced MLX's functions by turns would leave a replacement behind.
    """
    thread = threading.get_ident()
    stand_ins: dict[str, Callable[..., mx.array]] = {
        "contiguous": lambda x, *_, **__: mx.abs(x),
        "to_fp8": lambda x, *_, **__: x.astype(mx.uint8),
        "from_fp8": lambda x, dtype=mx.bfloat16, **_: x.astype(dtype),
    }
    own: dict[str, Callable[..., mx.array]] = {}

    def chosen(name: str) -> Callable[..., mx.array]:
        def run(*args: Any, **kwargs: Any) -> mx.array:
            here = threading.get_ident() == thread
            result: mx.array = (stand_ins if here else own)[name](*args, **kwargs)
            return result

        return run

    with _ONE_AT_A_TIME:
        own.update({name: getattr(mx, name) for name in stand_ins})
        try:
            for name in own:
                setattr(mx, name, chosen(name))
            yield
        finally:
            for name, function in own.items():
                setattr(mx, name, function)


def _num_experts(module: Any) -> int:
    return int(next(child.num_experts for child in module.children().values() if hasattr(child, "num_experts")))
