"""The line between experts and KV while a model runs: room for requests, live resizing, giving back under pressure.

The plan draws the line at load. Here it moves: requests that need more KV than planned take it from expert slots, the
guard gives slots back when the machine is short of memory, and both are undone when they can be. No token changes.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence

from mlxmoe.errors import MemoryBudgetError, MemoryPressureError, UnsupportedModelError
from mlxmoe.experts.cache import ExpertCache
from mlxmoe.memory.experts import divide_slots
from mlxmoe.memory.guard import Guard, MemoryEvent, Reclaim
from mlxmoe.memory.plan import KVBytes, Plan, replan
from mlxmoe.memory.reading import MemoryReader, Reading, usable_bytes
from mlxmoe.memory.release import release_freed
from mlxmoe.memory.sizes import format_bytes
from mlxmoe.memory.watch import Watch

STEP_SHARE = 1 / 8  # of the planned slots that the guard moves at a time
CHUNK_TOKENS_UNDER_PRESSURE = 256

logger = logging.getLogger(__name__)


class Lease:
    """What one cache, or one of a batch, may grow to. It counts as long as it lives and holds something."""

    def __init__(self, balance: Balance, kv: KVBytes) -> None:
        self.nbytes = 0
        self.kv = kv
        self._balance = balance

    def begin(self, tokens: int, *, texts: int = 1) -> None:
        """Hold room for a request with `tokens` in all, or `texts` of as many, taken from expert slots where need be.

        Raises MemoryBudgetError where it cannot be had, MemoryPressureError while nothing new may begin.
        """
        self._balance.admit(self, tokens, texts)

    def keep(self, tokens: int, *, texts: int = 1) -> None:
        """Hold no more than caches of `tokens` take; none of it for 0. Nothing moves at once."""
        self.nbytes = min(self.nbytes, texts * self.kv.of(tokens) if tokens else 0)


class Room:
    """The budget at work: what the banks may hold beside the caches of requests. Any thread may call."""

    def __init__(self, experts: ExpertCache, plan: Plan, kv: KVBytes) -> None:
        self.plan = plan
        self.kv = kv
        self._experts = experts
        # Not a WeakSet: a Ctrl-C that falls into its callback, when a lease is forgotten, would be swallowed.
        self._leases: list[weakref.ref[Lease]] = []
        self._leases_lock = threading.RLock()  # held for moments only
        self._lock = threading.RLock()  # held while banks are resized
        self._shrinks = True  # until it turns out that the experts cannot be read in place

    @property
    def leased_bytes(self) -> int:
        """KV of all requests under way and sessions: what their caches may grow to."""
        return sum(lease.nbytes for lease in self._alive())

    def refuse_within(self) -> None:
        """Raise RequestError within a pass of this thread: another may hold the lock, and wait for that pass."""
        self._experts.passes.refuse_within()

    def hold(self, lease: Lease, tokens: int, texts: int = 1) -> int:
        """Let `lease` hold `texts` caches of `tokens` each; returns the bytes that expert slots gave for it.

        Raises MemoryBudgetError, and then nothing has changed.
        """
        nbytes = texts * lease.kv.of(tokens)
        with self._lock:
            others = [other.nbytes for other in self._alive() if other is not lease and other.nbytes]
            banks = self._bank_bytes_beside(sum(others) + nbytes)
            given = self._shrink(self._experts.nbytes - banks) if banks >= self._floor_bytes else 0
            if self._experts.nbytes > banks:
                raise MemoryBudgetError(self._no_room(tokens, texts, lease.kv, others))
            with self._leases_lock:
                if lease not in self._alive():
                    self._leases.append(weakref.ref(lease))
            lease.nbytes = nbytes
            return given

    def resize(self, experts: int | float | str, most_bytes: int) -> None:
        """Plan anew with `experts`, and have its slots now, taking at most `most_bytes` more.

        Raises what the plan and the banks raise.
        """
        self.refuse_within()
        with self._lock:
            before, plan = self.plan, replan(self.plan, self._experts.layers, experts)
            more = plan.bank_bytes - self._experts.nbytes
            if more > max(0, most_bytes):
                raise MemoryBudgetError(
                    f"experts={experts!r} takes {format_bytes(more)} more, but the machine can give "
                    f"{format_bytes(most_bytes)} now. Close other programs, or resize to less."
                )
            room = max(self._floor_bytes, self._bank_bytes_beside(self.leased_bytes))
            layers = self._experts.layers
            self.plan = plan  # first: what is cut short on the way to it is not beyond it
            try:
                self._experts.resize(plan.slots if plan.bank_bytes <= room else divide_slots(room, layers))
            except UnsupportedModelError:
                self.plan = before
                raise

    def shrink_step(self) -> int:
        """Give back an eighth of the planned slots; returns the bytes."""
        return self._shrink(self._step_bytes)

    def shrink_all(self) -> int:
        """Give back all but what one token needs; returns the bytes."""
        return self._shrink(self._experts.nbytes)

    def grow(self, most_bytes: int) -> int:
        """Take a step towards the planned slots, within `most_bytes` and what requests leave; returns the bytes.

        Raises CheckpointReadError where a layer that is to hold all its experts cannot be filled.
        """
        with self._lock:
            now = self._experts.nbytes
            if now > self.plan.bank_bytes:  # a resize was cut short
                self._shrink(now - self.plan.bank_bytes)
                return 0
            room = min(most_bytes, self._step_bytes, self._bank_bytes_beside(self.leased_bytes) - now)
            slots = self._experts.grown(self.plan.slots, room)
            if slots != self._experts.slots:
                self._experts.resize(slots)
            return self._experts.nbytes - now

    @property
    def bank_bytes(self) -> int:
        """What all slots take now."""
        return self._experts.nbytes

    def _alive(self) -> list[Lease]:
        with self._leases_lock:
            self._leases = [ref for ref in self._leases if ref() is not None]
            return [lease for ref in self._leases if (lease := ref()) is not None]

    @property
    def _step_bytes(self) -> int:
        largest = max((layer.expert_bytes for layer in self._experts.layers), default=0)
        return max(largest, int(self.plan.bank_bytes * STEP_SHARE))

    @property
    def _fixed_bytes(self) -> int:
        return self.plan.trunk_bytes + self.plan.prefill_bytes + self.plan.pool_bytes

    @property
    def _floor_bytes(self) -> int:
        return sum(layer.floor_bytes for layer in self._experts.layers)

    def _bank_bytes_beside(self, leased_bytes: int) -> int:
        plan = self.plan
        return plan.memory_bytes - self._fixed_bytes - max(plan.kv_bytes, leased_bytes)

    def _shrink(self, nbytes: int) -> int:
        with self._lock:
            before = self._experts.nbytes
            slots = self._experts.shrunk(nbytes) if self._shrinks and nbytes > 0 else self._experts.slots
            try:
                if slots != self._experts.slots:
                    self._experts.resize(slots)
            except UnsupportedModelError as error:
                self._shrinks = False
                logger.warning("The experts stay in memory whatever happens: %s", error)
            return before - self._experts.nbytes

    def _no_room(self, tokens: int, texts: int, kv: KVBytes, others: Sequence[int]) -> str:
        plan, least = self.plan, self._floor_bytes if self._shrinks else self._experts.nbytes
        room = max(0, plan.memory_bytes - self._fixed_bytes - least - sum(others))
        beside = f" and {format_bytes(sum(others))} for {len(others)} other requests or sessions" if others else ""
        what = "A KV cache for" if texts == 1 else f"The KV caches of {texts} texts in one batch, for up to"
        takes = "takes" if texts == 1 else "each take"
        return (
            f"{what} {tokens} tokens {takes} {format_bytes(kv.of(tokens))}, but the memory budget of "
            f"{format_bytes(plan.memory_bytes)} has {format_bytes(room)} for it, beside "
            f"{format_bytes(plan.trunk_bytes)} trunk, {format_bytes(self._fixed_bytes - plan.trunk_bytes)} for "
            f"prefill, {format_bytes(least)} for the experts that must stay{beside}. At most "
            f"{kv.tokens_in(room // texts)} tokens, prompt and reply, fit now: ask for fewer, close other sessions, "
            f"or raise memory=."
        )


class Balance:
    """Room and guard together: what the token loop, the requests and the engine ask of them.

    `spare`: what is given back before expert slots are, the cheapest first.
    """

    def __init__(
        self,
        room: Room,
        *,
        on_event: Callable[[MemoryEvent], None] | None = None,
        spare: Sequence[Reclaim] = (),
    ) -> None:
        self._room = room
        self._reports = MemoryReader()  # its own: each reader compares with its last reading
        cache = Reclaim("the expert cache", room.shrink_step, room.shrink_all)
        self.guard = Guard(MemoryReader().read, release_freed, [*spare, cache], room.grow, on_event=on_event)
        self._watch = Watch(self.guard)

    @property
    def plan(self) -> Plan:
        """How the memory is to be divided; the guard and requests may have moved the line since."""
        return self._room.plan

    @property
    def kv(self) -> KVBytes:
        return self._room.kv

    @property
    def leased_bytes(self) -> int:
        return self._room.leased_bytes

    def reading(self) -> Reading:
        """What the machine says now."""
        return self._reports.read()

    def lease(self, kv: KVBytes | None = None) -> Lease:
        """For one cache, which holds nothing yet and takes what `kv` says, by default what the engine's own take."""
        return Lease(self, self.kv if kv is None else kv)

    def admit(self, lease: Lease, tokens: int, texts: int = 1) -> None:
        """Lease.begin's work."""
        self._room.refuse_within()
        self.guard.check()
        if self.guard.restricts:
            raise MemoryPressureError(
                "The machine is critically short of memory, so nothing new is begun; the expert cache has given back "
                "what it could. Close other programs or wait a little, and ask again."
            )
        if given := self._room.hold(lease, tokens, texts):
            self.guard.resized()
            who = "A request with" if texts == 1 else f"A batch of {texts} requests with up to"
            text = f"{who} {tokens} tokens of context took {format_bytes(given)} from the expert cache."
            self.guard.tell("admit", given, text)

    def resize(self, experts: int | float | str) -> None:
        """Engine.resize's work."""
        before = self._room.bank_bytes
        try:
            self._room.resize(experts, usable_bytes(self.reading()))
        finally:
            if (after := self._room.bank_bytes) != before:
                self.guard.resized()
                text = f"The expert cache was resized from {format_bytes(before)} to {format_bytes(after)}."
                self.guard.tell("resize", after - before, text)

    def before_pass(self) -> None:
        """Between two passes: read the pressure, if it is time to, and act on it."""
        self.guard.check()

    def after_step(self, seconds: float) -> None:
        """A decode step took `seconds`."""
        self.guard.note_step(seconds)

    @property
    def must_finish(self) -> bool:
        """Whether replies have to end because memory is short and nothing is left to give."""
        return self.guard.must_finish

    @property
    def chunk_tokens(self) -> int | None:
        """The most tokens of a prefill chunk now; None where nothing bounds it."""
        return CHUNK_TOKENS_UNDER_PRESSURE if self.guard.restricts else None

    def close(self) -> None:
        """End the watching thread, once what it does is done. May be called twice."""
        self._watch.close()
