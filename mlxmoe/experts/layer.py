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

from mlxmoe.errors import RequestError
from mlxmoe.experts.bank import ExpertBank
from mlxmoe.experts.lookahead import Lookahead
from mlxmoe.experts.switch import mixed

KEEP_PENDING_BYTES = 1 << 20  # a larger output is evaluated at once rather than kept until the pass is over

Forward = Callable[[mx.array, mx.array], mx.array]


class Passes:
    """Whose turn it is: forward passes over one set of banks run one at a time.

    Within a pass (`with passes.one()`) outputs may stay unevaluated, because whoever opened it evaluates them in the
    same thread before it ends. A layer called outside of any pass takes a turn of its own.

    What a pass `leave`s to MLX is scheduled, so any thread may wait for it, and whoever has the next turn does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._left: tuple[mx.array, int] | None = None  # what was left to MLX, and the thread that did

    @contextmanager
    def one(self, following: mx.array | None = None) -> Iterator[None]:
        """Wait for the pass under way, then hold the turn for one pass.

        `following`: what this thread left to MLX and goes on from, so that it need not be done yet; anything else is.
        Raises RequestError within a pass of the same thread: a signal handler must not touch slots in use.
        """
        self.refuse_within()
        with self._lock:
            try:
                self._owner = threading.get_ident()
                if self._left is not None and (self._left[0] is not following or self._left[1] != self._owner):
                    left, self._left = self._left[0], None  # if it fails, then once
                    mx.eval(left)
                yield
            finally:
                self._owner = None

    def leave(self, result: mx.array, *others: object) -> None:
        """Within a pass: have MLX evaluate these, which are done by the next turn, unless that follows `result`.

        Of a pass in which no layer streams: slots could be overwritten meanwhile.
        """
        start_computing(result, *others)
        self._left = result, threading.get_ident()

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
    """How one layer computes from its bank, in as many waves as that takes.

    `foretold`: the guesses for this layer; `ahead`: those for the next one that streams, which are made here.
    """

    def __init__(self, bank: ExpertBank, passes: Passes) -> None:
        self.bank = bank
        self.passes = passes
        self.foretold: Lookahead | None = None
        self.ahead: Lookahead | None = None
        self._pending: list[mx.array] = []

    def __call__(self, x: mx.array, indices: mx.array, forward: Forward) -> mx.array:
        """`x [..., D]`, `indices [..., K]` of experts -> `[..., K, D]`; `forward` is the stock layer over slots.

        Called within a pass. One host sync. It also evaluates what this layer returned last in the same pass, so that
        nothing unevaluated reads a slot when slots are overwritten.
        """
        out = self._compute(x, indices, forward)
        self._pending = [out]
        if out.nbytes > KEEP_PENDING_BYTES:
            mx.eval(self.take_pending())
        return out

    def take_pending(self) -> list[mx.array]:
        """What this layer returned last and may not be evaluated yet, for the pass to evaluate."""
        pending, self._pending = self._pending, []
        return pending

    def _compute(self, x: mx.array, indices: mx.array, forward: Forward) -> mx.array:
        bank, top_k = self.bank, indices.shape[-1]
        guess = [] if self.ahead is None else self.ahead.guess(x, top_k)
        flat = indices.flatten()  # a copy of what is a view, within the one evaluation
        mx.eval(flat, self._pending, guess)
        experts = cast(list[int], flat.tolist())
        slots = bank.slots_of_hits(experts)
        waves = [] if slots is not None else bank.want(experts, top_k)
        if self.foretold is not None:
            self.foretold.note_call(set(experts))
        for wave in waves[:2]:
            bank.fetch(wave)
        if self.ahead is not None and guess:
            self.ahead.expect(guess[0])  # behind what is waited for
        if len(waves) > 1:
            out = self._in_waves(x, indices, experts, waves, forward)
        else:
            for wave in waves:
                bank.arrive(wave)
            out = forward(x, _shaped(bank.slots_of(experts) if slots is None else slots, indices))
        start_computing(out)  # while the host sees to the rest, and builds what comes next
        if slots is None:
            bank.used()
        else:
            bank.used_hits(experts, top_k)
        return out

    def _in_waves(
        self, x: mx.array, indices: mx.array, experts: Sequence[int], waves: Sequence[Sequence[int]], forward: Forward
    ) -> mx.array:
        """Compute the (token, expert) pairs wave by wave while the next is read; results go in the router's order."""
        bank, top_k, tokens = self.bank, indices.shape[-1], x.reshape(-1, x.shape[-1])
        wave_of = {expert: number for number, wave in enumerate(waves) for expert in wave}
        pairs_of: list[list[int]] = [[] for _ in waves]
        for pair, expert in enumerate(experts):
            pairs_of[wave_of[expert]].append(pair)
        parts: list[mx.array] = []
        fetched = computed = 0
        for number, (wave, pairs) in enumerate(zip(waves, pairs_of, strict=True)):
            while fetched < min(number + 2, len(waves)):
                if bank.fetch(waves[fetched]):
                    fetched += 1
                elif computed < number:  # slots of what was computed are free once it really was
                    mx.eval(parts[computed])
                    bank.computed(waves[computed])
                    computed += 1
                else:
                    break
            bank.arrive(wave)
            slots = bank.slots_of([experts[pair] for pair in pairs])
            rows = mx.array([pair // top_k for pair in pairs])
            part = forward(tokens[rows], mx.array(slots, dtype=indices.dtype)[:, None]).squeeze(-2)
            start_computing(part)
            parts.append(part)
        order = mx.argsort(mx.array([pair for pairs in pairs_of for pair in pairs]))
        return mx.concatenate(parts)[order].reshape(*indices.shape, -1)


def _shaped(slots: list[int], like: mx.array) -> mx.array:
    """`slots` as an array of the shape and type of `like`."""
    if len(slots) > like.shape[-1]:
        return mx.array(slots, dtype=like.dtype).reshape(like.shape)
    nested: list[Any] = slots  # of one token: to nest the list costs the host less than an operation
    for _ in like.shape[1:]:
        nested = [nested]
    return mx.array(nested, dtype=like.dtype)


def start_computing(*arrays: object) -> None:
    """Have MLX evaluate `arrays`, or trees of them, without waiting for them."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]  # its stub has no types


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


def compute_from(module: nn.Module, stream: ExpertStream) -> None:
    """Let `module` compute from the bank of `stream`, whose homes are in it."""
    module.expert_stream = stream
    module.__class__ = mixed(_Streaming, type(module))


def compute_whole(module: nn.Module) -> None:
    """Let `module` be mlx-lm's own code again; its arrays must hold each expert at its number."""
    module.__class__ = module.stock_class


def computes_from_bank(module: nn.Module) -> bool:
    return isinstance(module, _Streaming)
