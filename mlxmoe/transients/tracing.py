"""The graph of one prefill chunk, as the model builds it, with the points where a streaming layer evaluates.

mlx's export hands over every primitive with its shapes and evaluates nothing, as long as everything that holds data
is an input: tokens, caches, weights. Knows nothing of how a graph is evaluated.

Legend: T tokens, K experts a token (top_k), E experts, D width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from mlxmoe.experts.layer import KEEP_PENDING_BYTES
from mlxmoe.experts.policy import wave_size
from mlxmoe.experts.switch import Listening, mixed
from mlxmoe.kv.layers import leaves_of
from mlxmoe.kv.window import SlidingWindowKVCache
from mlxmoe.memory.plan import KV_STEP

MakeCaches = Callable[[nn.Module], list[Any]]

# Of a deeper model only some layers are traced: at most more than the longest period of any definition; with the
# least, predictions for twelve definitions of 14 layers were within 4 % of those with all (most within 0.5 %).
MOST_LAYERS, LEAST_LAYERS = 12, 4
SPARED_LAYERS = 2  # to be left out at least


class Value(NamedTuple):
    """An array of the graph, by the name that the export gave it. There are very many."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Node:
    """One primitive."""

    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    arguments: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Step:
    """What a streaming layer evaluates: its indices, the waves' parts one by one, its output if that is large."""

    indices: str
    parts: tuple[str, ...]
    out: str
    out_bytes: int

    @property
    def kept_bytes(self) -> int:
        """What stays until the pass is over, because it is too small to be evaluated by itself."""
        return self.out_bytes if self.out_bytes <= KEEP_PENDING_BYTES else 0


@dataclass(slots=True)
class TracedChunk:
    """A chunk's graph. `prior`: the caches' arrays before it; `states`: those after it, `state_bytes` together.

    `state_caches`: how many of the caches hold a state instead of keys and values. `left_out`: of a deep model, how
    many layers that stream are not in the graph; None where it has all layers.
    """

    nodes: list[Node] = field(default_factory=list)
    prior: list[Value] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    state_bytes: int = 0
    state_caches: int = 0
    steps: list[Step] = field(default_factory=list)
    left_out: int | None = None


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
    with _few_layers(model, halved) as short:
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


def has_states(model: nn.Module) -> bool:
    """Whether any cache of `model` holds a state instead of keys and values: those may be computed by a loop."""
    return count_states(make_prompt_cache(model)) > 0


def count_states(caches: Sequence[Any]) -> int:
    """How many of them hold a state."""
    return sum(isinstance(cache, ArraysCache) for cache in leaves_of(caches))


def state_bytes(
    model: nn.Module, modules: Mapping[str, nn.Module], chunk: int, seen: int, make_caches: MakeCaches
) -> int:
    """What the caches of the whole model hold after that chunk: windows hold more than they keep."""
    caches = _seen_caches(make_caches(model), model, modules, seen, chunk)
    with Listening(dict(modules)):
        model(mx.zeros((1, chunk), dtype=mx.int32), cache=caches)
    return sum(array.nbytes for array in _state(caches))


def _trace(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    slots: Mapping[str, int],
    chunk: int,
    seen: int,
    make_caches: MakeCaches,
) -> TracedChunk:
    caches = _seen_caches(make_caches(model), model, modules, seen, chunk)
    prior = _arrays(caches)
    homes = [(m, key) for m in model.modules() for key, value in m.items() if isinstance(value, mx.array)]
    weights = [home[key] for home, key in homes]
    calls: list[_Call] = []
    reading = _Reading(len(prior))
    state_sizes: list[int] = []

    def run(tokens: mx.array, *inputs: mx.array) -> list[mx.array]:
        _put(caches, iter(inputs[: len(prior)]))
        for (home, key), weight in zip(homes, inputs[len(prior) :], strict=True):
            home[key] = weight
        calls.clear()
        model(tokens, cache=caches)
        states = _state(caches)
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


@contextmanager
def _few_layers(model: nn.Module, halved: bool = False) -> Iterator[bool]:
    """Within this context a deep model has its first layers only, or half of those. Yields whether it is deep."""
    lists = [value for module in model.modules() for value in module.values() if isinstance(value, list)]
    stacks = [value for value in lists if all(isinstance(layer, nn.Module) for layer in value)]
    layers = max(stacks, key=len, default=[])
    most = _layers_to_trace(model, layers)
    cut: list[tuple[list[Any], list[Any]]] = []
    if len(layers) - most > SPARED_LAYERS:  # else it is not worth it
        beside = [
            value for value in lists if value is not layers and len(value) == len(layers)
        ]  # types of the layers
        most = most // 2 if halved else most
        cut = [(value, value[most:]) for value in (layers, *beside)]
    try:
        for value, _ in cut:
            del value[most:]
        yield bool(cut)
    finally:
        for value, rest in cut:
            value.extend(rest)


def _layers_to_trace(model: nn.Module, layers: Sequence[nn.Module]) -> int:
    """How many of the first layers tell all: a few more than hold each kind of layer.

    With states, which may be computed by a loop and then have large graphs, twice as many as hold each kind at least.
    """
    kinds = [str([(path, type(module)) for path, module in layer.named_modules()]) for layer in layers]
    all_kinds = max((kinds.index(kind) for kind in kinds), default=0) + 1
    if has_states(model):  # of which WaitingStates compares two halves
        return min(MOST_LAYERS, max(2 * LEAST_LAYERS, 2 * all_kinds))
    return min(MOST_LAYERS, max(LEAST_LAYERS, all_kinds + 2))


def _seen_caches(
    caches: list[Any], model: nn.Module, modules: Mapping[str, nn.Module], seen: int, chunk: int
) -> list[Any]:
    """`caches` after `seen` tokens, unevaluated; the last of them came in one chunk, as windows depend on it."""
    with Listening(dict(modules)):
        if seen > chunk:
            with _sinks_once(caches):
                _see(model, caches, seen - chunk)
        if seen:
            model(mx.zeros((1, min(seen, chunk)), dtype=mx.int32), cache=caches)
    return caches


def _see(model: nn.Module, caches: list[Any], count: int) -> None:
    """Let `caches` see `count` tokens; the model itself no more than a step of them where it has states.

    Those are of one size after any number, but their definitions may build a graph as long as the text.
    """
    leaves = leaves_of(caches)
    rest = count - KV_STEP if any(isinstance(entry, ArraysCache) for entry in leaves) else 0
    given: list[tuple[Any, mx.array, mx.array]] = []
    with _overheard(leaves, given):
        model(mx.zeros((1, count - max(0, rest)), dtype=mx.int32), cache=caches)
    if rest > 0:
        for entry, *rows in given:
            entry.update_and_fetch(*(mx.zeros((*part.shape[:2], rest, part.shape[3]), part.dtype) for part in rows))


@contextmanager
def _overheard(leaves: Sequence[Any], given: list[tuple[Any, mx.array, mx.array]]) -> Iterator[None]:
    """Within this context the keys and values that caches are given are noted."""

    def noting(entry: Any, take: Callable[[mx.array, mx.array], Any]) -> Callable[[mx.array, mx.array], Any]:
        def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
            given.append((entry, keys, values))
            return take(keys, values)

        return update_and_fetch

    told = [entry for entry in leaves if hasattr(entry, "update_and_fetch")]
    try:
        for entry in told:
            entry.update_and_fetch = noting(entry, entry.update_and_fetch)
        yield
    finally:
        for entry in told:
            vars(entry).pop("update_and_fetch", None)


@contextmanager
def _sinks_once(caches: Sequence[Any]) -> Iterator[None]:
    """Within this context windows hand out no sinks again for steps of their positions: what they keep is the same.

    All of a long text in one call would have as many of them as it has steps, for nothing.
    """
    windows = [entry for entry in leaves_of(caches) if isinstance(entry, SlidingWindowKVCache)]
    positions = [window.positions for window in windows]
    try:
        for window in windows:
            window.positions = None
        yield
    finally:
        for window, own in zip(windows, positions, strict=True):
            window.positions = own


def _arrays(caches: Sequence[Any]) -> list[mx.array]:
    """Every array that the caches hold, in the order in which `_put` takes them."""
    found: list[mx.array] = []
    for entry in leaves_of(caches):
        tree_map(lambda value: found.append(value) if isinstance(value, mx.array) else None, dict(vars(entry)))
    return found


def _put(caches: Sequence[Any], arrays: Iterator[mx.array]) -> None:
    for entry in leaves_of(caches):
        held = tree_map(lambda value: next(arrays) if isinstance(value, mx.array) else value, dict(vars(entry)))
        vars(entry).update(held)


def _state(caches: Sequence[Any]) -> list[mx.array]:
    """What the decoder evaluates after a chunk."""
    return [array for entry in caches for _, array in tree_flatten(entry.state) if isinstance(array, mx.array)]


def _num_experts(module: Any) -> int:
    return int(next(child.num_experts for child in module.children().values() if hasattr(child, "num_experts")))
