"""The slots of one layer: which expert is where, filling, evicting, resizing. Knows nothing of models or pressure.

A slot belongs to an expert only once all its bytes are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import mlx.core as mx

from mlxmoe.errors import CheckpointReadError
from mlxmoe.experts.checkpoint import ExpertTensor
from mlxmoe.experts.policy import LRFU, plan_waves
from mlxmoe.experts.reader import ExpertReader, Read
from mlxmoe.experts.slots import Home, SlotMemory

EMPTY = -1


@dataclass(slots=True)
class BankCounters:
    """What one bank did so far. A hit or a miss is counted once for each expert and call that wants it.

    `foreseen`: experts wanted by calls that lookahead had guessed for, and named; `unforeseen`: those it had not.
    `early_bytes`: read before they were asked for, beside `bytes_read`; `early_useful_bytes`: then asked for next.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_read: int = 0
    early_bytes: int = 0
    early_useful_bytes: int = 0
    foreseen: int = 0
    unforeseen: int = 0


class _Loan(NamedTuple):
    """A slot to read into. `victim`: who is there until the first byte is read, None in a free one; `last_call`: in
    which call the victim was last used.
    """

    slot: int
    victim: int | None = None
    last_call: int = 0


class _Coming(NamedTuple):
    """An expert that is being read."""

    loan: _Loan
    read: Read


class ExpertBank:
    """Room for `slots` of a layer's experts, all of them where None: then their arrays at `homes` hold them already.

    `tensors`, `homes`: as SlotMemory has them. `counters`: go on from these. `expert_bytes`: of one expert, all its
    tensors together.
    """

    def __init__(
        self,
        tensors: Mapping[str, ExpertTensor],
        homes: Mapping[str, Home],
        slots: int | None,
        reader: ExpertReader,
        counters: BankCounters | None = None,
    ) -> None:
        self._memory = SlotMemory(tensors, homes, slots)
        self.num_experts = self._memory.num_experts
        self.expert_bytes = self._memory.expert_bytes
        self.counters = counters or BankCounters()
        self._reader = reader
        self._policy = LRFU()
        self._changing = True
        self._coming: dict[int, _Coming] = {}
        self._wanted: list[int] = []  # of the call under way
        self._free: list[int] = []
        self._guessed: frozenset[int] = frozenset()  # what the next call was expected to want
        self._begun = 0  # how many reads for a guess begin before the call for it comes, by what is known
        self._needed: set[int] = set()  # those of the wanted whose slots may not be overwritten yet
        self._recover()
        if slots is None:
            everyone = range(self.num_experts)
            self._hold(dict(zip(everyone, everyone, strict=True)), dict.fromkeys(everyone, 0))

    @property
    def slots(self) -> int:
        """How many there are."""
        return self._memory.slots

    @property
    def arrays(self) -> dict[str, mx.array]:
        """The slots' memory: for each expert tensor one array `[slots, ...]`."""
        return self._memory.arrays

    @property
    def nbytes(self) -> int:
        """Bytes that the slots occupy, filled or not."""
        return self._memory.nbytes

    @property
    def resident(self) -> dict[int, int]:
        """Who is where: expert -> slot, the first to give it up first."""
        return {expert: self._slot_of[expert] for expert in self._policy}

    @property
    def is_resident(self) -> tuple[bool, ...]:
        """Whether each expert is here, for other threads to look at: a copy, in which nothing changes."""
        return tuple(slot != EMPTY for slot in tuple(self._slot_of))

    @property
    def ages(self) -> list[int]:
        """For each slot how many calls ago it was last used, the oldest first; an empty one is older than all."""
        used = self._policy.ages
        return [self._policy.calls + 1] * (self.slots - len(used)) + sorted(used, reverse=True)

    def slots_of(self, experts: Sequence[int]) -> list[int]:
        """The slot of each of `experts`, which must all have been admitted by the wave at hand."""
        slot_of = self._slot_of
        slots = [slot_of[expert] for expert in experts]
        assert EMPTY not in slots, "every expert of a wave has arrived"
        return slots

    def slots_of_hits(self, experts: Sequence[int]) -> list[int] | None:
        """The slots of a call for `experts` if each has one: `used_hits` is to follow. Else None, and nothing.

        Most calls of most layers take this way instead of that from `want` to `used`, so it is kept short.
        """
        if self._changing or self._coming or self._guessed:
            return None
        slot_of = self._slot_of
        slots = [slot_of[expert] for expert in experts]
        return None if EMPTY in slots else slots

    def used_hits(self, experts: Sequence[int], top_k: int) -> None:
        """A call for `experts`, `top_k` for each token in turn, found all of them in their slots."""
        self._policy.hit(experts, top_k)
        self.counters.hits += len(set(experts))

    def want(self, experts: Sequence[int], top_k: int) -> list[list[int]]:
        """A call wants these experts, `top_k` for each token in turn. Returns them in waves; counts hits.

        Until `used` the call goes on: `fetch` and `arrive` see to one wave after the other, `computed` to its slots.
        However that ends (a failed read, Ctrl-C), no slot claims bytes that it does not hold.
        """
        if self._changing:
            self._recover()
        self._changing = True
        self._policy.count(experts, top_k)
        last_use = dict(zip(experts, count()))
        wanted = last_use.keys()
        self._wanted, self._needed = list(wanted), set(wanted)
        if self._coming:
            self._take_in(called=True)
        if self._guessed:
            foreseen = len(wanted & self._guessed)
            self.counters.foreseen += foreseen
            self.counters.unforeseen += len(last_use) - foreseen
            self._guessed = frozenset()
        hits = len(wanted & self._policy.held)
        self.counters.hits += hits
        self.counters.misses += len(last_use) - hits
        if hits == len(last_use):
            return [self._wanted]
        return plan_waves(last_use, self._policy, self._coming, self.slots)

    def fetch(self, wave: Sequence[int]) -> bool:
        """Begin to read what of `wave` has no slot. False, and nothing happens, as long as there is no room for it.

        Overwrites slots, but none of experts that the call still needs: whatever else reads slots must have been
        evaluated. Raises CheckpointReadError.
        """
        held = self._policy.held
        missing = [expert for expert in wave if expert not in held and expert not in self._coming]
        if not missing:
            return True
        if not self._make_room(len(missing)):
            return False
        slots, self._free = self._free[: len(missing)], self._free[len(missing) :]
        read = self._reader.start(self._memory.pieces(missing, slots))
        self._coming.update(zip(missing, (_Coming(_Loan(slot), read) for slot in slots), strict=True))
        return True

    def arrive(self, wave: Sequence[int]) -> None:
        """Wait until every expert of `wave`, which was fetched, is in its slot. Raises CheckpointReadError."""
        arrived = [expert for expert in wave if expert in self._coming]
        for expert in arrived:
            loan, read = self._coming[expert]
            try:
                read.wait()
            except CheckpointReadError:
                if not read.early:
                    raise
                # a guess costs a read at most, never a reply
                self._reader.read(self._memory.pieces([expert], [loan.slot]))
            self.counters.bytes_read += 0 if read.early else self.expert_bytes
        self._settle_in(arrived)

    def computed(self, wave: Sequence[int]) -> None:
        """The call needs the slots of `wave` no more: what reads them was evaluated."""
        self._needed.difference_update(wave)

    def used(self) -> None:
        """The call is over, and all its experts that are here were used."""
        held = self._policy.held
        self._policy.touch([expert for expert in self._wanted if expert in held])
        self._wanted, self._needed = [], set()
        self._changing = False

    def expect(self, experts: Iterable[int]) -> None:
        """Begin to read what is not here of `experts`, which the next call will probably want, the surest first.

        As `fetch`, between two calls. What else reads slots must have been evaluated. A slot is the victim's again
        where no byte was read into it by the next call. Slots are lent for one read more than the disk got to lately.
        """
        if self._changing:
            self._recover()
        self._changing = True
        guessed = dict.fromkeys(experts)
        self._needed, self._guessed = set(guessed), frozenset(guessed)
        if self._coming:  # of a guess that no call came for
            self._take_in(called=False)
        missing = [expert for expert in guessed if expert not in self._policy and expert not in self._coming]
        loans = self._lend(min(len(missing), self._begun + 1))
        for expert in missing[: len(loans)]:
            try:
                read = self._reader.start(self._memory.pieces([expert], [loans[0].slot]), early=True)
            except CheckpointReadError:
                break  # whoever needs it will say so
            self._coming[expert] = _Coming(loans.popleft(), read)
        for loan in loans:
            self._give_back(loan)
        self._changing = False

    def await_early(self) -> None:
        """Between two calls: have nothing under way any more."""
        if self._changing:
            self._recover()
        if self._coming:
            self._changing, self._needed = True, set()
            self._take_in(called=False)
            self._changing = False

    def resize(self, slots: int) -> None:
        """Have `slots` slots; the experts worth least lose theirs. Nothing unevaluated may read the arrays.

        With a slot for each expert, expert n goes to slot n. Needed beside the bank is one array. However this ends,
        no slot claims bytes that it does not hold.
        """
        assert 1 <= slots <= self.num_experts, "a slot for nobody is wasted memory"
        self.await_early()
        old, last_calls = self.resident, self._policy.last_calls
        kept = list(old)[max(0, len(old) - slots) :]
        new = self._targets({expert: old[expert] for expert in kept}, slots)
        self._changing = True
        self._forget()
        self._memory.move({new[expert]: old[expert] for expert in kept}, slots)
        self._hold(new, {expert: last_calls[expert] for expert in kept})
        self._changing = False

    def fill(self, order: Sequence[int] | None = None) -> None:
        """Read experts that have no slot into free ones, as many of `order` (by default all) as there is room for.

        They are the oldest. Raises CheckpointReadError.
        """
        self.await_early()
        order = range(self.num_experts) if order is None else order
        missing = [expert for expert in order if expert not in self._policy][: len(self._free)]
        slots = dict(zip(sorted(missing), sorted(self._free), strict=False))  # with room for all: n goes to slot n
        targets = {expert: slots[expert] for expert in missing}
        self._changing = True  # a read that is cut short may go on for a moment
        self._reader.read(self._memory.pieces(list(targets), list(targets.values())))
        self.counters.bytes_read += len(targets) * self.expert_bytes
        self._hold({**targets, **self.resident}, {**dict.fromkeys(targets, 0), **self._policy.last_calls})
        self._changing = False

    def clear(self) -> None:
        """Forget every expert, and have nothing read any more; the memory stays."""
        self._reader.settle()
        self._forget()
        self._changing = False

    def view(self, name: str, slot: int) -> memoryview:
        """The bytes of one tensor of one slot, writable."""
        return self._memory.view(name, slot)

    def _recover(self) -> None:
        """After a call or a resize that was cut short: nothing it left behind can be relied on."""
        self._memory.recover()
        self.clear()

    def _forget(self) -> None:
        self._policy.clear()
        self._coming, self._wanted, self._needed = {}, [], set()
        self._slot_of = [EMPTY] * self.num_experts
        self._free = list(range(self.slots))

    def _hold(self, slots: Mapping[int, int], last_calls: Mapping[int, int]) -> None:
        """Say who is where and when each was last used."""
        self._forget()
        for expert, slot in slots.items():
            self._slot_of[expert] = slot
        self._policy.restore(last_calls)
        self._free = sorted(set(range(self.slots)) - set(slots.values()))

    def _targets(self, slot_of: Mapping[int, int], slots: int) -> dict[int, int]:
        """Where experts go that now have the slots `slot_of`, when there are `slots`: few of them move."""
        if slots == self.num_experts:
            return {expert: expert for expert in slot_of}
        free = iter(sorted(set(range(slots)) - set(slot_of.values())))
        return {expert: slot if slot < slots else next(free) for expert, slot in slot_of.items()}

    def _take_in(self, *, called: bool) -> None:
        """See to what was read early: what has come or is needed stays, of the others no thread reads on.

        `called`: whether the needed are wanted now, and not a guess once more.
        """
        withdrawn = [expert for expert, coming in self._coming.items() if coming.read.withdraw()]
        for expert in withdrawn:  # all first: threads go on while others are dropped
            self._give_back(self._coming.pop(expert).loan)
        if called:
            self._begun = len(self._coming) if withdrawn else max(self._begun, len(self._coming))
        for expert, (loan, read) in list(self._coming.items()):
            needed = expert in self._needed
            if read.ready:
                self._settle_in([expert])
            elif needed and not read.failed:
                if called:
                    read.hurry()
            else:
                unread = read.drop()
                del self._coming[expert]
                self._free.append(loan.slot)
                self._note_early(loan, self.expert_bytes - unread)
                continue
            self.counters.early_useful_bytes += (called and needed) * self.expert_bytes

    def _settle_in(self, arrived: Sequence[int]) -> None:
        for expert in arrived:
            self._slot_of[expert] = self._coming[expert].loan.slot
        self._policy.admit(arrived)
        for expert in arrived:
            loan, read = self._coming.pop(expert)
            if read.early:
                self._note_early(loan, self.expert_bytes)

    def _note_early(self, loan: _Loan, nbytes: int) -> None:
        """So much was read into `loan` for a guess: it was the victim's."""
        self.counters.early_bytes += nbytes
        self.counters.evictions += loan.victim is not None

    def _make_room(self, count: int) -> bool:
        """Have `count` slots free, of experts that the call needs no more. False, and nothing, if that cannot be."""
        short = count - len(self._free)
        if short <= 0:
            return True
        if short > len(self._policy) - sum(expert in self._policy for expert in self._needed):
            return False
        for expert in self._policy.evict(short, self._needed):
            self._free.append(self._slot_of[expert])
            self._slot_of[expert] = EMPTY
        self.counters.evictions += short
        return True

    def _lend(self, count: int) -> deque[_Loan]:
        """At most `count` slots, free ones first, then of experts that are not needed; to be kept or given back."""
        loans = deque(map(_Loan, self._free[:count]))
        self._free = self._free[count:]
        for victim, last_call in self._policy.evict(count - len(loans), self._needed).items():
            loans.append(_Loan(self._slot_of[victim], victim, last_call))
            self._slot_of[victim] = EMPTY
        return loans

    def _give_back(self, loan: _Loan) -> None:
        """Nothing was read into it."""
        if loan.victim is None:
            self._free.append(loan.slot)
            return
        self._slot_of[loan.victim] = loan.slot
        self._policy.admit([loan.victim], loan.last_call)
