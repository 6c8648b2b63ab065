"""How an array lies in its buffer, and which primitives only look at it in another way. Arithmetic on strides."""

from __future__ import annotations

from functools import lru_cache

from mlxmoe.transients.graph import Node, Value

Shape = tuple[int, ...]
Strides = tuple[int, ...]  # in items, one for each axis

SAME = frozenset(["StopGradient", "Copy", "Depends"])  # look at the very same


@lru_cache(maxsize=1024)  # a graph has few shapes, and asks for each very often
def row_strides(shape: Shape) -> Strides:
    """Of an array whose rows lie one after the other."""
    strides, stride = [0] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = stride
        stride *= shape[axis]
    return tuple(strides)


def contiguous(shape: Shape, strides: Strides) -> bool:
    wanted = row_strides(shape)
    return strides == wanted or all(
        size == 1 or have == want for size, have, want in zip(shape, strides, wanted, strict=True)
    )


def is_matrix(shape: Shape, strides: Strides) -> bool:
    """Whether the last two axes lie as a matrix product takes them: by rows without gaps, or by columns."""
    if len(shape) < 2:
        return True
    (rows, columns), (down, right) = shape[-2:], strides[-2:]
    return (down == columns and right == 1) or (down == 1 and right == rows)


def view_strides(node: Node, source: Value, strides: Strides, output: Value) -> Strides | None:
    """The strides of `output` where it lies in the buffer of `source`, None where the primitive makes a new one."""
    match node.kind:
        case "Squeeze" | "ExpandDims":
            return _with_ones(source.shape, strides, output.shape)
        case "Broadcast" | "BroadcastAxes":
            return _broadcast(source.shape, strides, output.shape)
        case "Transpose":
            return tuple(strides[axis] for axis in node.arguments[0])
        case "Slice":
            steps = node.arguments[2]
            return tuple(stride * step for stride, step in zip(strides, steps, strict=True))
        case "Split" | "DynamicSlice":
            return strides
        case "Reshape" | "Flatten" | "Unflatten":
            return _reshaped(source.shape, strides, output.shape)
        case "AsStrided":
            return tuple(node.arguments[1])
        case kind if kind in SAME:
            return strides
    return None


def _with_ones(shape: Shape, strides: Strides, new_shape: Shape) -> Strides:
    """Axes of one row come or go; the others stay in their order."""
    left = [stride for size, stride in zip(shape, strides, strict=True) if size != 1]
    return tuple(left.pop(0) if size != 1 else 1 for size in new_shape)


def _broadcast(shape: Shape, strides: Strides, new_shape: Shape) -> Strides:
    missing = len(new_shape) - len(shape)
    return (0,) * missing + tuple(
        stride if size == new else 0 for size, stride, new in zip(shape, strides, new_shape[missing:], strict=True)
    )


def _reshaped(shape: Shape, strides: Strides, new_shape: Shape) -> Strides | None:
    """Where every new axis lies within axes that lie without gaps; None where the reshape must copy."""
    runs: list[list[int]] = []  # [items, stride of the last axis]: axes that lie as one
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = [runs[-1][0] * size, stride]
        else:
            runs.append([size, stride])
    made: list[int] = []
    left = 1
    run = iter(runs)
    stride = 0
    for size in new_shape:
        if size == 1:
            made.append(1)
            continue
        if left == 1:
            left, last = next(run, (1, 1))
            stride = left * last
        if left % size:
            return None
        left //= size
        stride //= size
        made.append(stride)
    return tuple(made)
