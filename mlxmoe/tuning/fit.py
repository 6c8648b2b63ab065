"""From measured decode steps to the constants of the model of speed. Pure arithmetic; knows no model and no file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from mlxmoe.tuning.roofline import Rates, Step

Floats = npt.NDArray[np.float64]


SYNCS = 2  # the column
FREE_PER_S = 1e15  # a rate for what takes no time that shows


@dataclass(frozen=True, slots=True)
class TimedStep:
    """What a decoded token asked for, on average, and the seconds it took. Its misses: all experts that were read."""

    step: Step
    seconds: float


def fit_rates(steps: Sequence[TimedStep], sync_s: float = 0.0) -> Rates:
    """The constants with which `decode_s` comes nearest to all `steps`, none of them negative.

    Least squares of the relative errors: a slow step counts as much as a fast one. What weights and layers take
    cannot be told apart (every step has the same): all of it is in the bandwidth, which is so the effective one.
    `sync_s`: what a layer that may have to wait takes at least, where that was measured: if all of them may have to
    in every step, the steps cannot tell.
    """
    assert steps, "nothing was measured"
    seconds = np.array([timed.seconds for timed in steps])
    asked = np.array([
        [1.0, s.step.kv_bytes, float(s.step.syncs), s.step.misses, s.step.missing_bytes] for s in steps
    ])  # fmt: skip
    syncs = asked[:, SYNCS]
    sync_s = min(sync_s, 0.5 * float((seconds / np.maximum(1.0, syncs)).min()))  # a step is more than waiting
    left = 1 - syncs * sync_s / seconds
    whole_s, kv_s, more_s, miss_s, read_s = _least_squares(asked / seconds[:, None], left)
    first = steps[0].step
    return Rates(
        bandwidth_bytes_per_s=(first.resident_bytes - first.kv_bytes) / whole_s,
        read_bytes_per_s=1 / max(read_s, 1 / FREE_PER_S),
        efficiency=1.0,
        layer_s=0.0,
        sync_s=sync_s + more_s,
        miss_s=miss_s,
        kv_bytes_per_s=1 / max(kv_s, 1 / FREE_PER_S),
    )


def _least_squares(a: Floats, b: Floats) -> list[float]:
    """`x >= 0` with the least `|a x - b|`. With a few columns, every choice of those that are not zero is tried.

    The first column is always used: a step takes time whatever it misses.
    """
    columns = a.shape[1]
    scale = np.where(np.abs(a).max(axis=0) > 0, np.abs(a).max(axis=0), 1.0)
    best, least = np.zeros(columns), np.inf
    for count in range(columns):
        for others in combinations(range(1, columns), count):
            used = [0, *others]
            solution, *_ = np.linalg.lstsq(a[:, used] / scale[used], b, rcond=None)
            error = float(((a[:, used] / scale[used] @ solution - b) ** 2).sum())
            if (solution >= 0).all() and solution[0] > 0 and error < least * (1 - 1e-6) - 1e-12:
                best, least = np.zeros(columns), error
                best[used] = solution / scale[used]
    return [float(value) for value in best]
