"""How many bytes are alive at once while MLX evaluates a graph: a simulation. Knows graphs, not models.

It follows MLX's `eval`: the order is breadth first from the outputs, limited in width, backwards; results get memory
when a primitive is scheduled, in an input's place where nothing else needs that; and scheduling runs ahead of the
computation, so inputs stay until the computation has caught up. On the CPU that is by up to eleven tasks of ten
operations. Where the computation is faster than that, less is alive than is said here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mlxmoe.transients.graph import Node, TracedChunk, Value
from mlxmoe.transients.layout import Strides, contiguous, is_matrix, row_strides, view_strides

BFS_WIDTH = 20  # MLX_BFS_MAX_WIDTH
OPERATIONS_PER_TASK = 10
TASKS_AHEAD = 10
DONATION_EXTRA = 16384  # bytes by which a donated buffer may be too large

# These may write their result over an input.
ELEMENTWISE = frozenset([
    "Abs", "Add", "AsType", "BitwiseBinary", "Ceil", "Compiled", "Cos", "Divide", "DynamicSliceUpdate", "Equal",
    "Erf", "Exp", "Expm1", "Floor", "FloorDivide", "Greater", "GreaterEqual", "LayerNorm", "Less", "LessEqual",
    "Log", "Log1p", "LogAddExp", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Multiply",
    "Negative", "NotEqual", "Power", "RMSNorm", "Remainder", "RoPE", "Round", "Scan", "Scatter", "ScatterAxis",
    "Select", "Sigmoid", "Sign", "Sin", "SliceUpdate", "Softmax", "Sqrt", "Square", "Subtract", "Tanh",
])  # fmt: skip
MATRIX = frozenset(["Matmul", "AddMM", "GatherMM", "BlockMaskedMM"])
ROW_INPUT = frozenset(["QuantizedMatmul", "GatherQMM", "QQMatmul"])


class Peak(NamedTuple):
    """The most bytes alive at once over the evaluations of a chunk, the caches before it among them.

    `states_bytes`: of the buffers in which the caches lie after it; more than theirs where they are views.
    """

    nbytes: int
    states_bytes: int


def peak_of(traced: TracedChunk) -> Peak:
    """Simulates the evaluations of a chunk."""
    simulation = _Simulation(traced)
    for value in traced.prior:
        simulation.allocate(value, value.nbytes, row_strides(value.shape))
    simulation.peak = simulation.now
    for step in traced.steps:
        simulation.evaluate([step.indices])
        for part in step.parts:
            simulation.evaluate([part])
        simulation.release([step.indices, *step.parts])
        if not step.kept_bytes:
            simulation.evaluate([step.out])
            simulation.release([step.out])
    simulation.evaluate(traced.states)
    simulation.evaluate([step.out for step in traced.steps if step.kept_bytes])
    return Peak(simulation.peak, simulation.held_by(traced.states))


class _Simulation:
    """The memory of one evaluation after another. A buffer is known by the first value that lay in it."""

    def __init__(self, traced: TracedChunk) -> None:
        self.now = self.peak = 0
        self._nodes = traced.nodes
        self._maker = {value.name: n for n, node in enumerate(traced.nodes) for value in node.outputs}
        kept = [*traced.states, *(name for s in traced.steps for name in (s.indices, *s.parts, s.out))]
        self._wanted = Counter(kept)  # by nodes not evaluated yet, and by Python
        for n in self._needed(kept):
            self._wanted.update(value.name for value in self._nodes[n].inputs)
        self._buffer: dict[str, str] = {}  # of each value that is alive
        self._strides: dict[str, Strides] = {}
        self._sizes: dict[str, int] = {}
        self._values: Counter[str] = Counter()  # alive in each buffer
        self._held: Counter[str] = Counter()  # by computations under way, for each buffer
        self._done: set[int] = set()
        self._operations = 0
        self._under_way: deque[tuple[int, list[str], int]] = deque()

    def evaluate(self, names: Sequence[str]) -> None:
        for n in self._order(names):
            self._run(self._nodes[n])
            self._done.add(n)
        self._computed_up_to(self._operations)

    def release(self, names: Iterable[str]) -> None:
        """Python, or a node that was evaluated, lets go of these values."""
        for name in names:
            self._wanted[name] -= 1
            if self._wanted[name] <= 0 and name in self._buffer:
                buffer = self._buffer.pop(name)
                self._values[buffer] -= 1
                self._free(buffer)

    def held_by(self, names: Iterable[str]) -> int:
        """Bytes of the buffers in which these values lie."""
        return sum(self._sizes[buffer] for buffer in {self._buffer[name] for name in names if name in self._buffer})

    def allocate(self, value: Value, nbytes: int, strides: Strides) -> None:
        self._sizes[value.name] = nbytes
        self.now += nbytes
        self._place(value, value.name, strides)

    def _needed(self, names: Iterable[str]) -> set[int]:
        needed: set[int] = set()
        stack = list(names)
        while stack:
            n = self._maker.get(stack.pop())
            if n is not None and n not in needed:
                needed.add(n)
                stack += [value.name for value in self._nodes[n].inputs]
        return needed

    def _order(self, names: Sequence[str]) -> list[int]:
        """The nodes that make `names` and are not done, in MLX's order."""
        inputs = {-1: [self._maker[name] for name in names if name in self._maker]}
        consumers: Counter[int] = Counter()
        stack = [-1]
        while stack:
            for n in self._pending_inputs(stack.pop(), inputs):
                if n not in consumers:
                    stack.append(n)
                consumers[n] += 1
        tape, position, left = [-1], 0, len(consumers)
        stopped: list[tuple[int, int]] = []  # nodes whose inputs did not all fit the width, and which come next
        while left and (position < len(tape) or stopped):
            if position < len(tape):
                node, start = tape[position], 0
                position += 1
            else:
                node, start = stopped.pop()
            for index, n in enumerate(self._pending_inputs(node, inputs)[start:], start):
                if len(tape) - position >= BFS_WIDTH:
                    stopped.append((node, index))
                    break
                consumers[n] -= 1
                if consumers[n] == 0:
                    left -= 1
                    tape.append(n)
        return tape[:0:-1]

    def _pending_inputs(self, node: int, known: dict[int, list[int]]) -> list[int]:
        if node not in known:
            makers = (self._maker.get(value.name) for value in self._nodes[node].inputs)
            known[node] = [n for n in makers if n is not None and n not in self._done]
        elif node == -1:
            known[node] = [n for n in known[node] if n not in self._done]
        return known[node]

    def _run(self, node: Node) -> None:
        behind = self._operations // OPERATIONS_PER_TASK - TASKS_AHEAD
        self._computed_up_to(behind * OPERATIONS_PER_TASK)
        temporary = 0
        if not self._as_views(node):
            temporary = self._temporary_bytes(node)
            self._make(node)
            self.now += temporary
            self._operations += 1 + (len(node.inputs) - 1 if node.kind == "Concatenate" else 0) + (temporary > 0)
        self.peak = max(self.peak, self.now)
        self._operations += 1
        buffers = {self._buffer[v.name] for v in (*node.inputs, *node.outputs[1:]) if v.name in self._buffer}
        buffers.discard(self._buffer.get(node.outputs[0].name, ""))
        self._held.update(buffers)
        self._under_way.append((self._operations, list(buffers), temporary))
        self.release(value.name for value in node.inputs)
        for value in node.outputs:
            if not self._wanted[value.name]:
                self.release([value.name])

    def _as_views(self, node: Node) -> bool:
        """Whether the node only looks at its first input's buffer in another way; if so, that is noted."""
        if not node.inputs:
            return False
        source = node.inputs[0]
        strides = self._strides_of(source)
        looks = [view_strides(node, source, strides, output) for output in node.outputs]
        if any(look is None for look in looks):
            return False
        for output, look in zip(node.outputs, looks, strict=True):
            assert look is not None, "none is, or this is no view"
            if source.name in self._buffer:
                self._place(output, self._buffer[source.name], look)
            else:  # a weight's: no memory of the chunk
                self._strides[output.name] = look
        return True

    def _make(self, node: Node) -> None:
        """Give each output a buffer: a new one, or that of an input which nothing else needs."""
        given = [value for value in node.inputs if self._can_be_given(value, node)]
        for output in node.outputs:
            fits = [v for v in given if self._fits(v, output)]
            if fits:
                given.remove(fits[0])
                self._place(output, self._buffer[fits[0].name], self._strides[fits[0].name])
            else:
                self.allocate(output, output.nbytes, row_strides(output.shape))

    def _can_be_given(self, value: Value, node: Node) -> bool:
        buffer = self._buffer.get(value.name)
        return (
            buffer is not None
            and node.kind in ELEMENTWISE
            and self._wanted[value.name] == 1
            and self._values[buffer] == 1
            and not self._held[buffer]
            and contiguous(value.shape, self._strides[value.name])
        )

    def _fits(self, value: Value, output: Value) -> bool:
        return (
            value.itemsize == output.itemsize
            and value.nbytes == output.nbytes
            and self._sizes[self._buffer[value.name]] <= output.nbytes + DONATION_EXTRA
        )

    def _temporary_bytes(self, node: Node) -> int:
        """Copies that the computation makes of inputs which do not lie as it wants them."""
        kind = node.kind
        if kind in MATRIX:
            return sum(v.nbytes for v in node.inputs[:2] if not is_matrix(v.shape, self._strides_of(v)))
        if kind in ROW_INPUT:
            return sum(v.nbytes for v in node.inputs[:1] if not contiguous(v.shape, self._strides_of(v)))
        if kind == "Convolution":  # padded, and each place's neighbourhood laid out
            return node.inputs[0].nbytes * (1 + node.inputs[1].shape[1])
        return 0

    def _strides_of(self, value: Value) -> Strides:
        return self._strides.get(value.name) or row_strides(value.shape)

    def _place(self, value: Value, buffer: str, strides: Strides) -> None:
        self._buffer[value.name] = buffer
        self._strides[value.name] = strides
        self._values[buffer] += 1

    def _computed_up_to(self, operation: int) -> None:
        while self._under_way and self._under_way[0][0] <= operation:
            _, buffers, temporary = self._under_way.popleft()
            self.now -= temporary
            for buffer in buffers:
                self._held[buffer] -= 1
                self._free(buffer)

    def _free(self, buffer: str) -> None:
        if not self._values[buffer] and not self._held[buffer]:
            self.now -= self._sizes.pop(buffer, 0)
