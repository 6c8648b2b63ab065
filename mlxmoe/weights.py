"""Weights from disk into memory, in steps. Knows arrays, not what they are for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from mlxmoe.errors import CheckpointReadError, brief
from mlxmoe.memory.sizes import format_bytes

STEP_BYTES = 256 * 2**20  # between two progress reports


def read_weights(arrays: Sequence[mx.array], path: Path, tell: Callable[[int], None]) -> None:
    """Evaluate `arrays`, which still lie in the files of `path`; `tell` is told the bytes so far.

    Raises CheckpointReadError.
    """
    done, step, step_bytes = 0, [], 0
    try:
        for array in arrays:
            step.append(array)
            step_bytes += array.nbytes
            if step_bytes >= STEP_BYTES or array is arrays[-1]:
                mx.eval(step)
                done += step_bytes
                step, step_bytes = [], 0
                tell(done)
    except (RuntimeError, OSError) as error:
        total = sum(array.nbytes for array in arrays)
        raise CheckpointReadError(
            f"Reading the weights of {path} stopped after {format_bytes(done)} of {format_bytes(total)}: "
            f"{brief(error)}"
        ) from error
