"""Guessing which experts the next layer will want, so that they are read before it asks. Never changes a result.

The next MoE block is called on this layer's hidden state with its switch layer listening: the block's own code
computes the routing, the switch layer notes the ids and computes nothing, and only the ids are ever evaluated. A
residual stream changes little from one layer to the next, so most of them are right; a wrong one costs a read. The
surest are read first: those at one end of what the router chose, which end depends on the definition and is learnt.

Whether that pays is measured: for the whole model by decode steps with and without it in turns (`Trial`), for a layer
by how many experts that were missing it named (`Gate`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from statistics import median
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxmoe.experts.bank import ExpertBank
from mlxmoe.experts.switch import Hearing, mixed
from mlxmoe.tree import Tree

logger = logging.getLogger(__name__)

LookaheadMode = Literal["auto"] | bool


class Trial:
    """Whether passes are faster with something than without: some with and some without in turns, then what won.

    `on`: whether to do it in the pass at hand. `asked`: whether that pass could do it at all; others say nothing.
    """

    TURNS = 16  # passes of each kind, of which the medians are compared
    HOLD = 512  # passes before it is tried again: what the disk and the text give may have changed

    def __init__(self) -> None:
        self.on = True
        self.asked = False
        self._held = 0  # passes for which the last result still holds
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def note(self, seconds: float) -> None:
        """The pass at hand took `seconds`."""
        asked, self.asked = self.asked, False
        if not asked:
            return
        if self._held:
            self._held -= 1
            return
        self._seconds[self.on].append(seconds)
        self.on = not self.on
        if all(len(times) >= self.TURNS for times in self._seconds.values()):
            self.on = median(self._seconds[True]) < median(self._seconds[False])
            self._held = self.HOLD
            self._seconds = {True: [], False: []}


class Gate:
    """Whether to guess for one layer: not while it misses hardly anything, or its guesses name little of that.

    `open`: whether to guess in the call at hand.
    """

    CALLS = 64  # between two decisions
    LEAST = 1 / 16  # experts a call that must be missing and named; a guess costs about what a small read does
    REST = 512  # calls before guesses that named too little are tried again

    def __init__(self) -> None:
        self.open = True
        self._calls = self._count = self._rest = 0

    def note(self, missing: int, named: int) -> None:
        """A call wanted `missing` experts that were in no slot, `named` of them guessed."""
        self._calls += 1
        self._count += named if self.open else missing
        self._rest = max(0, self._rest - 1)
        if self._calls < self.CALLS:
            return
        enough = self._count >= self.LEAST * self.CALLS
        if self.open and not enough:
            self._rest = self.REST
        self.open = enough and not self._rest
        self._calls = self._count = 0


class Lookahead:
    """Guesses for one layer. `block`: the module whose forward pass routes; `module`: its switch layer.

    `trial`: shared by the layers of a model; None to guess whether it pays or not.
    """

    def __init__(self, block: nn.Module, module: nn.Module, trial: Trial | None) -> None:
        self.trial = trial
        self.gate = Gate()
        self._block = block
        self._module = module
        self._hearing: Any = mixed(Hearing, type(module))
        self._works = True
        self._counted = (0, 0)
        self._named: list[int] = []  # by the last guess, all tokens' first choices before all second ones
        self._lean = 0  # how many more were right at the end of guesses than at their beginning
        self.follow(None)

    def follow(self, bank: ExpertBank | None, take_pending: Callable[[], list[mx.array]] = list) -> None:
        """Have `bank` read what is guessed; None while the layer does not stream.

        `take_pending`: what may still have to be evaluated before slots of it are overwritten.
        """
        self._bank, self._take_pending = bank, take_pending

    def guess(self, x: mx.array, top_k: int) -> list[mx.array]:
        """To be evaluated before `expect`: first of all the ids of the experts that the layer will probably want.

        Empty where nothing is to be read early. `x [..., D]`: the hidden state of an earlier layer. `top_k`: experts
        that a token of it wanted there.
        """
        if self._bank is None or not self._works or x.size // x.shape[-1] * top_k > self._bank.slots:
            return []
        if self.trial is not None:
            self.trial.asked = True
            if not (self.trial.on and self.gate.open):
                return []
        streaming = type(self._module)
        if self._hearing.stock_class is not streaming:
            self._hearing = mixed(Hearing, streaming)
        try:
            self._module.__class__ = self._hearing
            self._block(x.reshape(1, -1, x.shape[-1]))
        except Exception as error:  # whatever a definition raises that routes elsewhere, or from another width
            logger.debug("No lookahead for %s: %s", type(self._block).__name__, error)
        finally:
            self._module.__class__ = streaming
        heard = self._module.__dict__.pop("heard", None)
        self._works = heard is not None
        return [heard, *self._take_pending()] if self._works else []

    def expect(self, guess: mx.array) -> None:
        """Have the bank read what is missing of an evaluated `guess [..., K]`, behind what is waited for."""
        assert self._bank is not None, "a guess is made for a bank"
        named: list[int] = np.asarray(guess).reshape(-1, guess.shape[-1]).T.ravel().tolist()
        self._named = named
        self._bank.expect(named[::-1] if self._lean > 0 else named)

    def note_call(self, wanted: Collection[int]) -> None:
        """The layer was called for the experts `wanted`, and its bank has counted them."""
        if self._named:
            half, right = len(self._named) // 2, [expert in wanted for expert in self._named]
            self._lean += sum(right[len(right) - half :]) - sum(right[:half])
            self._named = []
        assert self._bank is not None, "a layer that streams has a bank"
        counters = self._bank.counters
        now = counters.misses, counters.early_useful_bytes // self._bank.expert_bytes
        (missing, named), self._counted = (n - before for n, before in zip(now, self._counted, strict=True)), now
        self.gate.note(missing, named)


def routing_blocks(model: nn.Module, paths: Sequence[str]) -> dict[str, Any]:
    """For each switch layer the module that most probably routes to it: what holds it, or its `experts`."""
    modules = Tree.of(model).modules
    blocks = {}
    for path in paths:
        parent = path.rpartition(".")[0]
        while parent and (parent not in modules or parent.rpartition(".")[2] == "experts"):
            parent = parent.rpartition(".")[0]
        blocks[path] = modules[parent]  # at the worst the model itself, whose call fails and is not tried again
    return blocks
