"""Recording which experts the tokens of passes ask for. Knows switch modules and passes, not what is made of a trace.

While somebody records, each pass runs with the classes of the switch modules exchanged for subclasses that note their
indices, and puts them back before it ends: nothing is resized within a pass, so that nobody else sees them. Resident
layers are recorded as well as streaming ones; the arithmetic is theirs. The indices are evaluated together when the
pass is over. While nobody records, nothing of this is there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxmoe.experts.switch import Passing, mixed
from mlxmoe.experts.trace import NO_EXPERT, Trace, layer_numbers
from mlxmoe.memory.experts import MoeLayer

MAX_TOKENS = 100_000  # of a recording: 77 MB for 48 layers of 8 experts a token

logger = logging.getLogger(__name__)

Routed = npt.NDArray[np.uint16]  # [tokens, moe_layers, top_k]


class Recording:
    """What was recorded so far; made by `Engine.record()`. `full`: tokens beyond `max_tokens` were left out.

    It takes two bytes for each token, layer and expert, and twice that while `trace` is put together.
    """

    def __init__(self, layers: Sequence[MoeLayer], max_tokens: int) -> None:
        self.full = False
        self._layers = tuple(layers)
        self._max_tokens = max_tokens
        self._passes: list[Routed] = []
        self._tokens = 0
        self._ended = False

    @property
    def tokens(self) -> int:
        """Recorded so far."""
        return self._tokens

    @property
    def trace(self) -> Trace:
        """The tokens of all passes so far, in the order of the passes; within one those of a batch's first row first.

        Whoever's they were: streams that interleave are mixed as they were computed. Where a layer saw fewer tokens
        of a pass than others (a definition may go on with a text's last token only), they are taken to be the last.
        """
        passes = list(self._passes)
        top_k = max([layer.top_k for layer in self._layers] + [one.shape[2] for one in passes])
        whole = np.full((sum(map(len, passes)), len(self._layers), top_k), NO_EXPERT, np.uint16)
        done = 0
        for one in passes:
            whole[done : done + len(one), :, : one.shape[2]] = one
            done += len(one)
        return Trace(
            whole,
            tuple(layer.num_experts for layer in self._layers),
            layer_numbers([layer.path for layer in self._layers]),
        )

    def end(self) -> None:
        """Record nothing more."""
        self._ended = True

    def note(self, routed: Routed) -> None:
        """Keep the routing of one pass."""
        if self._ended or self.full:
            return
        if self._tokens + len(routed) > self._max_tokens:
            self.full = True
            logger.warning(
                "The recording is full: of %d tokens or more the first %d are kept. Ask for more with max_tokens=.",
                self._tokens + len(routed), self._max_tokens,
            )  # fmt: skip
            routed = routed[: self._max_tokens - self._tokens]
        self._tokens += len(routed)
        self._passes.append(routed)


class _Noting(Passing):
    """Mixed in before a switch module's class: notes the indices of each call, and changes nothing."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        heard = self.__dict__.get("heard_indices")
        if heard is not None:  # else a Ctrl-C hit the moment in which classes were put back
            heard.append(indices)
        out: mx.array = super().__call__(x, indices)  # type: ignore[misc]
        return out


@contextmanager
def noting(modules: Mapping[str, nn.Module], recordings: Sequence[Recording]) -> Iterator[None]:
    """Within a pass: tell `recordings`, when it ends well, what each of `modules` was asked for.

    Whatever Ctrl-C leaves of it is undone by `settle` before the next pass.
    """
    classes: dict[str, type] = {}
    noted: dict[type, type] = {}
    heard: list[list[mx.array]] = [[] for _ in modules]
    try:
        for (path, module), calls in zip(modules.items(), heard, strict=True):
            kind = classes[path] = type(module)
            if kind not in noted:
                noted[kind] = mixed(_Noting, kind)
            module.__dict__["heard_indices"] = calls  # not an entry of the module, which would be a parameter
            module.__class__ = noted[kind]
        yield
    finally:
        for path, kind in classes.items():
            modules[path].__class__ = kind
            modules[path].__dict__.pop("heard_indices", None)
    mx.eval(heard)
    routed = _as_one([[_rows(indices) for indices in calls] for calls in heard])
    if len(routed):
        for recording in recordings:
            recording.note(routed)


def _rows(indices: mx.array) -> npt.NDArray[Any]:
    """Evaluated `indices [..., K]` as `[tokens, K]`."""
    return np.array(indices).astype(np.uint16).reshape(-1, indices.shape[-1])


def _as_one(calls: Sequence[Sequence[npt.NDArray[Any]]]) -> Routed:
    """`calls`: for each layer its calls' `[tokens, K]` -> one array of all layers, NO_EXPERT where none was asked."""
    tokens = max((sum(map(len, rows)) for rows in calls), default=0)
    top_k = max((rows.shape[1] for layer in calls for rows in layer), default=0)
    routed = np.full((tokens, len(calls), top_k), NO_EXPERT, np.uint16)
    for column, layer in enumerate(calls):
        done = tokens - sum(map(len, layer))
        for rows in layer:
            routed[done : done + len(rows), column, : rows.shape[1]] = rows
            done += len(rows)
    return routed
