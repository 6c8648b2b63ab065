"""How much each expert is wanted, for who watches: recorded now and then while somebody does, never otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from mlxmoe.engine import Engine
from mlxmoe.experts.trace import NO_EXPERT

WATCHED_S = 5.0  # after somebody looked
EVERY = 4  # steps, of which one is recorded: recording evaluates every layer's routing
MOST_TOKENS = 4096
FADING = 0.8  # of the heat that is left after each recorded step


class Heat:
    """`[layers][experts]` of one engine. `clock`: monotonic seconds."""

    def __init__(
        self, engine: Engine, num_experts: Sequence[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._heat = [np.zeros(count) for count in num_experts]
        self._clock = clock
        self._seen: float | None = None
        self._steps = 0

    def seen(self) -> tuple[tuple[float, ...], ...]:
        """Each expert's share of the most wanted one's in its layer, from 0 to 1. Keeps the heat coming."""
        self._seen = self._clock()
        return tuple(tuple(np.round(row / max(row.max(initial=0.0), 1e-9), 3).tolist()) for row in self._heat)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around a step: recorded where it is time to."""
        watched = self._seen is not None and self._clock() - self._seen < WATCHED_S
        self._steps += 1
        if not self._heat or not watched or self._steps % EVERY:
            yield
            return
        with self._engine.record(max_tokens=MOST_TOKENS) as recording:
            yield
        if recording.tokens:
            self._note(recording.trace.experts)

    def _note(self, experts: npt.NDArray[np.uint16]) -> None:
        """`experts [tokens, layers, top_k]` were wanted."""
        for layer, row in enumerate(self._heat):
            wanted = experts[:, layer]
            row *= FADING
            row += np.bincount(wanted[wanted != NO_EXPERT], minlength=len(row))[: len(row)]
