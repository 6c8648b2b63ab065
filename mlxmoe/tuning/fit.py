"""From measured decode steps to the constants of the model of speed. Pure arithmetic; knows no model and no file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from mlxmoe.tuning.roofline import READ_BYTES_PER_S, Rates, Step

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimedStep:
    """What a decoded token asked for, with the misses that were counted, and the seconds it took, on average."""

    step: Step
    seconds: float


def fit_rates(steps: Sequence[TimedStep], read_bytes_per_s: float | None) -> Rates:
    """The constants with which `decode_s` comes nearest to all `steps`, none of them negative.

    Least squares of the relative errors: a slow step counts as much as a fast one. What weights and layers take
    cannot be told apart (every step has the same): all of it is in the bandwidth, which is so the effective one.
    `read_bytes_per_s`: as measured, None where it was not; a miss that took less came from the page cache.
    """
    assert steps, "nothing was measured"
    seconds = np.array([timed.seconds for timed in steps])
    asked = np.array([[1.0, s.step.kv_bytes, float(s.step.syncs), s.step.misses] for s in steps])
    whole_s, kv_s, sync_s, miss_s = _least_squares(asked / seconds[:, None], np.ones(len(steps)))
    first = steps[0].step
    weight_bytes = first.resident_bytes - first.kv_bytes
    missing = [timed.step for timed in steps if timed.step.misses > 0]
    miss_bytes = sum(s.missing_bytes for s in missing) / sum(s.misses for s in missing) if missing else 0.0
    read = read_bytes_per_s or READ_BYTES_PER_S
    if missing and miss_s > 0:
        read = max(read, miss_bytes / miss_s)
    return Rates(
        bandwidth_bytes_per_s=weight_bytes / whole_s,
        read_bytes_per_s=read,
        efficiency=1.0,
        layer_s=0.0,
        sync_s=sync_s,
        miss_s=max(0.0, miss_s - miss_bytes / read),
        kv_bytes_per_s=1 / kv_s if kv_s > 0 else float("inf"),
    )


def _least_squares(a: Floats, b: Floats) -> list[float]:
    """`x >= 0` with the least `|a x - b|`. With four columns, every choice of those that are not zero is tried.

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
            # More constants always fit a little better; they have to earn it.
            if (solution >= 0).all() and solution[0] > 0 and error < least * (1 - 1e-6) - 1e-12:
                best, least = np.zeros(columns), error
                best[used] = solution / scale[used]
    return [float(value) for value in best]
