"""The slots of one layer: which expert is where, filling, evicting, resizing. Knows nothing of models or pressure.

A slot belongs to an expert only once all its bytes are there. The slots' memory is written in place through
memoryviews; the arrays are never assigned to (MLX would copy or move them, and two banks would be alive at once). The
layer's own module holds them, so that what computes and what is written to cannot be two different arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import mlx.core as mx

from mlxmoe.errors import CheckpointReadError
from mlxmoe.experts.checkpoint import ExpertTensor
from mlxmoe.experts.policy import LRFU, plan_waves
from mlxmoe.experts.reader import ExpertReader, Piece, Read

if TYPE_CHECKING:
    from typing_extensions import Buffer

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


class Home(NamedTuple):
    """Where an expert array lives: the module that computes from it, which is a dict, and its name there."""

    owner: dict[str, Any]
    key: str

    @property
    def array(self) -> mx.array:
        return cast(mx.array, self.owner[self.key])


class ExpertBank:
    """Room for `slots` of a layer's experts: for each expert tensor one array `[slots, ...]`, at its home.

    `homes`: where the layer's stacked arrays `[experts, ...]` are. They are replaced, only their shapes and dtypes
    are used; where `slots` is None they hold every expert already, and stay. `tensors`: where the bytes of each lie,
    under the same names. `counters`: go on from these. `expert_bytes`: of one expert, all its tensors together.
    """

    def __init__(
        self,
        tensors: Mapping[str, ExpertTensor],
        homes: Mapping[str, Home],
        slots: int | None,
        reader: ExpertReader,
        counters: BankCounters | None = None,
    ) -> None:
        assert tensors.keys() == homes.keys(), "every array has a place on disk"
        self.num_experts: int = next(iter(homes.values())).array.shape[0]
        assert slots is None or 1 <= slots <= self.num_experts, "a slot for nobody is wasted memory"
        self.slots = self.num_experts if slots is None else slots
        self.counters = counters or BankCounters()
        self._homes = dict(homes)
        self._tensors = [tensors[name] for name in homes]
        self.expert_bytes = sum(tensor.nbytes for tensor in self._tensors)
        self._reader = reader
        self._policy = LRFU()
        self._changing = True
        self._views: list[list[memoryview]] = []
        self._coming: dict[int, tuple[int, Read]] = {}  # experts being read: the slot, and the read
        self._wanted: list[int] = []  # of the call under way
        self._free: list[int] = []
        self._guessed: frozenset[int] = frozenset()  # what the next call was expected to want
        self._needed: set[int] = set()  # those of it whose slots may not be overwritten yet
        if slots is not None:
            for home in homes.values():
                array = home.array
                home.owner[home.key] = mx.zeros((slots, *array.shape[1:]), dtype=array.dtype)
        self._recover()
        if slots is None:
            everyone = range(self.num_experts)
            self._hold(dict(zip(everyone, everyone, strict=True)), dict.fromkeys(everyone, 0))

    @property
    def arrays(self) -> dict[str, mx.array]:
        """The slots' memory: for each expert tensor one array `[slots, ...]`."""
        return {name: home.array for name, home in self._homes.items()}

    @property
    def nbytes(self) -> int:
        """Bytes that the slots occupy, filled or not."""
        return sum(home.array.nbytes for home in self._homes.values())

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
        now = self._policy.calls
        used = [now - call for call in self._policy.last_calls.values()]
        return [now + 1] * (self.slots - len(used)) + sorted(used, reverse=True)

    def slots_of(self, experts: Sequence[int]) -> list[int]:
        """The slot of each of `experts`, which must all have been admitted by the wave at hand."""
        slot_of = self._slot_of
        slots = [slot_of[expert] for expert in experts]
        assert EMPTY not in slots, "every expert of a wave has arrived"
        return slots

    def slots_of_hits(self, experts: Sequence[int], top_k: int) -> list[int] | None:
        """A whole call for `experts`, as from `want` to `used`, if each has a slot: those. Else None, and nothing.

        Most calls of most layers take this way, so it is kept short.
        """
        if self._changing or self._coming or self._guessed:
            return None
        slot_of = self._slot_of
        slots = [slot_of[expert] for expert in experts]
        if EMPTY in slots:
            return None
        self._policy.count(experts, top_k)
        self._policy.touch(experts)
        self.counters.hits += len(set(experts))
        return slots

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
            self._take_in()
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
        read = self._reader.start(self._pieces(missing, slots))
        self._coming.update(zip(missing, ((slot, read) for slot in slots), strict=True))
        return True

    def arrive(self, wave: Sequence[int]) -> None:
        """Wait until every expert of `wave`, which was fetched, is in its slot. Raises CheckpointReadError."""
        arrived = [expert for expert in wave if expert in self._coming]
        for expert in arrived:
            slot, read = self._coming[expert]
            try:
                read.wait()
            except CheckpointReadError:
                if not read.early:
                    raise
                self._reader.read(self._pieces([expert], [slot]))  # a guess costs a read at most, never a reply
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

        As `fetch`, between two calls. What else reads slots must have been evaluated.
        """
        if self._changing:
            self._recover()
        self._changing = True
        guessed = dict.fromkeys(experts)
        self._needed, self._guessed = set(guessed), frozenset(guessed)
        missing = [expert for expert in guessed if expert not in self._policy and expert not in self._coming]
        self._make_room(len(missing))
        for expert in missing[: len(self._free)]:
            slot = self._free[-1]
            try:
                read = self._reader.start(self._pieces([expert], [slot]), early=True)
            except CheckpointReadError:
                break  # whoever needs it will say so
            self._free.pop()
            self._coming[expert] = slot, read
            self.counters.early_bytes += self.expert_bytes
        self._changing = False

    def await_early(self) -> None:
        """Between two calls: have nothing under way any more."""
        if self._changing:
            self._recover()
        if self._coming:
            self._changing, self._needed = True, set()
            self._take_in()
            self._changing = False

    def resize(self, slots: int) -> None:
        """Have `slots` slots; the experts worth least lose theirs. Nothing unevaluated may read the arrays.

        With a slot for each expert, expert n goes to slot n. One array is replaced after the other, so what is needed
        beside the bank is one array. However this ends, no slot claims bytes that it does not hold.
        """
        assert 1 <= slots <= self.num_experts, "a slot for nobody is wasted memory"
        self.await_early()
        old, last_calls = self.resident, self._policy.last_calls
        kept = list(old)[max(0, len(old) - slots) :]
        new = self._targets({expert: old[expert] for expert in kept}, slots)
        self._changing = True
        self._forget()
        for home in self._homes.values():
            self._views.clear()  # they keep the old arrays alive
            home.owner[home.key] = _rows(home.array, {new[expert]: old[expert] for expert in kept}, slots)
            mx.clear_cache()
        self._bind()
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
        self._reader.read(self._pieces(list(targets), list(targets.values())))
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
        return self._views[list(self._homes).index(name)][slot]

    def _bind(self) -> None:
        """Take the arrays as they are at home: their number of slots, and a view of each."""
        arrays = list(self.arrays.values())
        mx.eval(arrays)
        (self.slots,) = {array.shape[0] for array in arrays}
        self._views = [_slot_views(array) for array in arrays]
        for tensor, views in zip(self._tensors, self._views, strict=True):
            assert len(views[0]) == tensor.nbytes, "an expert on disk and a slot are of one size"

    def _recover(self) -> None:
        """After an admit or a resize that was cut short: nothing it left behind can be relied on.

        Arrays that it left longer than others are cut: kernels want them to have one number of slots.
        """
        count = min(home.array.shape[0] for home in self._homes.values())
        for home in self._homes.values():
            if home.array.shape[0] > count:
                self._views.clear()
                home.owner[home.key] = _rows(home.array, {}, count)
        self._bind()
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

    def _take_in(self) -> None:
        """See to what was read early: what has come or is needed stays, of the others no thread reads on."""
        for expert, (slot, read) in list(self._coming.items()):
            needed = expert in self._needed
            if read.ready:
                self._settle_in([expert])
                self.counters.early_useful_bytes += needed * self.expert_bytes
            elif needed and not read.failed:
                read.hurry()
                self.counters.early_useful_bytes += self.expert_bytes
                continue
            else:
                self.counters.early_bytes -= read.drop()
                del self._coming[expert]
                self._free.append(slot)

    def _settle_in(self, arrived: Sequence[int]) -> None:
        for expert in arrived:
            self._slot_of[expert] = self._coming[expert][0]
        self._policy.admit(arrived)
        for expert in arrived:
            del self._coming[expert]

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

    def _pieces(self, experts: Sequence[int], slots: Sequence[int]) -> list[Piece]:
        return [
            Piece(tensor.files[expert], tensor.offsets[expert], views[slot])
            for expert, slot in zip(experts, slots, strict=True)
            for tensor, views in zip(self._tensors, self._views, strict=True)
        ]


def _slot_views(array: mx.array) -> list[memoryview]:
    """The memory of each slot of an evaluated array `[slots, ...]`, as bytes."""
    whole = memoryview(cast("Buffer", array))
    assert whole.c_contiguous, "a fresh array is contiguous"
    flat = whole.cast("B")
    stride = flat.nbytes // array.shape[0]
    return [flat[start : start + stride] for start in range(0, flat.nbytes, stride)]


def _rows(array: mx.array, source: Mapping[int, int], count: int) -> mx.array:
    """`count` rows, of which row `n` is row `source[n]` of `array`; what the others hold does not matter."""
    rows = mx.take(array, mx.array([source.get(row, 0) for row in range(count)]), axis=0)
    mx.eval(rows)
    return rows
