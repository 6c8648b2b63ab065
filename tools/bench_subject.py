"""What is measured: mlx-lm's model and mlxmoe's engine, called alike. Only here are private names of mlxmoe used.

Legend: T tokens, V vocabulary, K experts a token.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from bench_reads import Preadv
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU

from mlxmoe import Engine, load
from mlxmoe.experts.reader import ExpertReader
from mlxmoe.experts.switch import switch_modules

CONTEXT = 2048  # tokens; what the cases use is less


def open_engine(folder: Path, experts: float | str, preadv: Preadv | None = None, **options: Any) -> Engine:
    """`mlxmoe.load`; `preadv` stands in for the system call with which experts are read."""
    if preadv is None:
        return load(folder, experts=experts, context=CONTEXT, **options)
    with patch("mlxmoe.loading.ExpertReader", partial(ExpertReader, preadv=preadv)):
        return load(folder, experts=experts, context=CONTEXT, **options)


class Subject:
    """A model with a cache of its own, run pass by pass: mlx-lm's, or an engine's within the engine's passes.

    Both evaluate the same things with the same calls. This is a plain loop: no step is built while the one before is
    computed.
    """

    def __init__(self, model: nn.Module, one_pass: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.model = model
        self._one_pass = one_pass
        self.cache = make_prompt_cache(model)

    @classmethod
    def of(cls, engine: Engine) -> Subject:
        return cls(engine.model, engine._experts.one_pass)

    def run(self, tokens: Sequence[int], *, caches_only: bool = False) -> mx.array:
        """The logits `[T, V]` of one pass over `tokens`, evaluated with the caches; modifies the cache.

        `caches_only`: evaluate what a prefill loop does. Its logits stay unevaluated.
        """
        with self._one_pass():
            logits: mx.array = self.model(mx.array([tokens]), cache=self.cache)[0]
            mx.eval([] if caches_only else logits, [entry.state for entry in self.cache])
        return logits

    @contextmanager
    def layers(self) -> Iterator[list[nn.Module]]:
        """The modules with routed experts, to be called within one pass."""
        with self._one_pass():
            yield list(switch_modules(self.model).values())


def sizes_of(model: nn.Module) -> tuple[int, int, int]:
    """Bytes of the trunk, bytes of all routed experts, and of one of them, of a stock model."""
    modules = switch_modules(model)
    total = sum(array.nbytes for array in _arrays(model))
    experts = sum(array.nbytes for module in modules.values() for array in _arrays(module))
    return total - experts, experts, experts // sum(num_experts(module) for module in modules.values())


def num_experts(module: nn.Module) -> int:
    """Of a stock module with routed experts: the rows of its stacked arrays."""
    return int(_arrays(module)[0].shape[0])


def width(module: nn.Module) -> int:
    """D of a stock module with routed experts."""
    return int((module.gate_proj if isinstance(module, SwitchGLU) else module.fc1).input_dims)


def _arrays(module: nn.Module) -> list[mx.array]:
    return [array for _, array in tree_flatten(module.parameters())]


class Stopwatch:
    """Times calls; `seconds` of the last one."""

    seconds = 0.0

    def __call__(self, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self.seconds = time.perf_counter() - began
        return result


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection would fall into somebody's step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_pairs(
    ours: Callable[[int], Any],
    stock: Callable[[int], Any],
    runs: int,
    same: Callable[[Any, Any], bool] | None = None,
) -> tuple[list[float], list[float], bool]:
    """Seconds of `ours(n)` and of `stock(n)`, one behind the other, each first by turns; and whether all agreed."""
    watch = Stopwatch()
    times: tuple[list[float], list[float]] = ([], [])
    agreed = True
    with no_garbage_collection():
        for n in range(runs):
            results: list[Any] = [None, None]
            for which in (0, 1) if n % 2 == 0 else (1, 0):
                work = (ours, stock)[which]
                results[which] = watch(lambda: work(n))  # noqa: B023  # called at once
                times[which].append(watch.seconds)
            agreed = agreed and (same is None or same(*results))
    return times[0], times[1], agreed


def equal(ours: mx.array, stock: mx.array) -> bool:
    return bool(mx.array_equal(ours, stock))
