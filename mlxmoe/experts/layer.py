"""The switch layer that computes from slots: mlx-lm's own forward over a bank. Knows nothing of whole models.

Legend: T tokens, K experts a token (top_k), E experts, D width.

mlx-lm's SwitchGLU and SwitchMLP take `x [..., D]` and `indices [..., K]` and return `[..., K, D]`. Their code
runs unchanged here: only their arrays shrink from `[E, ...]` to `[slots, ...]`, and the indices become slots. The
instance keeps its place in the model and its parameters' names; its class becomes a subclass of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from mlxmoe.errors import RequestError
from mlxmoe.experts.bank import ExpertBank, Home

SWITCH_TYPES = (SwitchGLU, SwitchMLP)
LINEAR_TYPES = (SwitchLinear, QuantizedSwitchLinear)

KEEP_PENDING_BYTES = 1 << 20  # a larger output is evaluated at once rather than kept until the pass is over

Forward = Callable[[mx.array, mx.array], mx.array]


class Passes:
    """Whose turn it is: forward passes over one set of banks run one at a time.

    Within a pass (`with passes.one()`) outputs may stay unevaluated, because whoever opened it evaluates them in the
    same thread before it ends. A layer called outside of any pass takes a turn of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def one(self) -> Iterator[None]:
        """Wait for the pass under way, then hold the turn for one pass.

        Raises RequestError within a pass of the same thread: a signal handler must not touch slots in use.
        """
        self.refuse_within()
        with self._lock:
            try:
                self._owner = threading.get_ident()
                yield
            finally:
                self._owner = None

    def refuse_within(self) -> None:
        """Raise RequestError within a pass of the calling thread."""
        if self.mine:
            raise RequestError(
                "The engine is in the middle of a step in this very thread, and a signal handler or callback called "
                "it again. Call it when the step is over."
            )

    @property
    def mine(self) -> bool:
        """Whether the calling thread is within a pass."""
        return self._owner == threading.get_ident()


class ExpertStream:
    """How one layer computes from its bank, in as many waves as that takes."""

    def __init__(self, bank: ExpertBank, passes: Passes) -> None:
        self.bank = bank
        self.passes = passes
        self._pending: list[mx.array] = []

    def __call__(self, x: mx.array, indices: mx.array, forward: Forward) -> mx.array:
        """`x [..., D]`, `indices [..., K]` of experts -> `[..., K, D]`; `forward` is the stock layer over slots.

        Called within a pass. One host sync. It also evaluates what this layer returned last in the same pass, so that
        nothing unevaluated reads a slot when slots are overwritten.
        """
        out = self._compute(x, indices, forward)
        if out.nbytes > KEEP_PENDING_BYTES:
            mx.eval(out)
        else:
            self._pending = [out]
        return out

    def take_pending(self) -> list[mx.array]:
        """What this layer returned last and may not be evaluated yet, for the pass to evaluate."""
        pending, self._pending = self._pending, []
        return pending

    def _compute(self, x: mx.array, indices: mx.array, forward: Forward) -> mx.array:
        mx.eval(indices, self.take_pending())
        experts = cast(list[int], indices.flatten().tolist())
        waves = self.bank.waves(experts, indices.shape[-1])
        if len(waves) > 1:
            return self._in_waves(x, indices, experts, waves, forward)
        self.bank.admit(waves[0])
        slots = mx.array(self.bank.slots_of(experts), dtype=indices.dtype).reshape(indices.shape)
        return forward(x, slots)

    def _in_waves(
        self,
        x: mx.array,
        indices: mx.array,
        experts: Sequence[int],
        waves: Sequence[Sequence[int]],
        forward: Forward,
    ) -> mx.array:
        """Compute the (token, expert) pairs wave by wave and put the results back in the router's order."""
        top_k = indices.shape[-1]
        tokens = x.reshape(-1, x.shape[-1])
        wave_of = {expert: number for number, wave in enumerate(waves) for expert in wave}
        pairs_of: list[list[int]] = [[] for _ in waves]
        for pair, expert in enumerate(experts):
            pairs_of[wave_of[expert]].append(pair)
        parts = []
        for wave, pairs in zip(waves, pairs_of, strict=True):
            self.bank.admit(wave)
            slots = self.bank.slots_of([experts[pair] for pair in pairs])
            rows = mx.array([pair // top_k for pair in pairs])
            part = forward(tokens[rows], mx.array(slots, dtype=indices.dtype)[:, None])
            mx.eval(part)  # before the next wave overwrites its slots
            parts.append(part.squeeze(-2))
        order = mx.argsort(mx.array([pair for pairs in pairs_of for pair in pairs]))
        return mx.concatenate(parts)[order].reshape(*indices.shape, -1)


class _Streaming:
    """Mixed in before the stock class: hands the stock forward to the module's ExpertStream."""

    expert_stream: ExpertStream

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if self.expert_stream.passes.mine:
            return self.expert_stream(x, indices, super().__call__)  # type: ignore[misc]
        with self.expert_stream.passes.one():
            self.expert_stream.take_pending()  # of a pass that was cut short: nobody will ask for it
            out = type(self).__call__(self, x, indices)  # a resize while we waited may have changed what we are
            mx.eval(out)
            return out


class _Listening:
    """Mixed in before the stock class: notes the shape of its indices, computes nothing, returns zeros."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self.heard_top_k = int(indices.shape[-1])
        return mx.zeros((*indices.shape, x.shape[-1]), dtype=x.dtype)


def switch_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of `model` that holds routed experts, by its path, in the order of the layers."""
    found = {path: module for path, module in model.named_modules() if isinstance(module, SWITCH_TYPES)}
    return dict(sorted(found.items(), key=lambda item: _by_number(item[0])))


def expert_homes(module: nn.Module) -> dict[str, Home]:
    """Where a switch module's arrays with one row for each expert live, by their path inside the module."""
    return {
        f"{name}.{key}": Home(child, key)
        for name, child in sorted(module.children().items())
        if isinstance(child, LINEAR_TYPES)
        for key in child.parameters()
    }


def expert_arrays(module: nn.Module) -> dict[str, mx.array]:
    """The arrays of a switch module that have one row for each expert, by their path inside the module."""
    return {name: home.array for name, home in expert_homes(module).items()}


def compute_from(module: nn.Module, stream: ExpertStream) -> None:
    """Let `module` compute from the bank of `stream`, whose homes are in it."""
    module.expert_stream = stream
    module.__class__ = mixed(_Streaming, type(module))


def compute_whole(module: nn.Module) -> None:
    """Let `module` be mlx-lm's own code again; its arrays must hold each expert at its number."""
    module.__class__ = module.stock_class


def computes_from_bank(module: nn.Module) -> bool:
    return isinstance(module, _Streaming)


class Listening:
    """Within this context, switch modules note their top_k and compute nothing.

    After a forward pass that is never evaluated, `top_k[path]` holds what each reached module heard.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._classes: dict[str, type] = {}
        self.top_k: dict[str, int] = {}

    def __enter__(self) -> Listening:
        for path, module in self._modules.items():
            self._classes[path] = type(module)
            module.__class__ = mixed(_Listening, type(module))
        return self

    def __exit__(self, *_: Any) -> None:
        for path, module in self._modules.items():
            module.__class__ = self._classes[path]
            if hasattr(module, "heard_top_k"):
                self.top_k[path] = module.heard_top_k
                del module.heard_top_k


def _by_number(path: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 behind layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


def mixed(mixin: type, stock: type) -> type:
    """A subclass of `stock` whose calls go through `mixin`; `stock_class` leads back."""
    return type(f"{mixin.__name__.strip('_')}{stock.__name__}", (mixin, stock), {"stock_class": stock})
