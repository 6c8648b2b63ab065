"""One memory budget divided: trunk, expert slots, KV, prefill. Pure arithmetic; reads no model and no machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mlxmoe.errors import MemoryBudgetError
from mlxmoe.memory.experts import MoeLayer, divide_slots, expert_budget
from mlxmoe.memory.sizes import format_bytes

KV_STEP = 256  # tokens by which mlx-lm's caches grow
CHUNK_TOKENS = (2048, 512, 128)  # of prefill at a time; the first is mlx-lm's own, for the same arithmetic
POOL_BYTES = 64 * 2**20  # freed buffers that MLX may keep for reuse, at least

# (chunk tokens, context tokens or None for any number) -> bytes that a prefill's activations take
Prefill = Callable[[int, int | None], int]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one kind in a KV cache: what each takes, and by which law there are more of them.

    `steps`: one for each token, by 256 at a time. `sliding`: the same up to `size` rows, all of them where no length
    is known. `window`: steps up to `size` tokens, but a prompt but for its last token lies without gaps. `chunk`:
    steps as long as `size` tokens are seen, then those and one step. `tokens`: one for each token up to `size`.
    `groups`: one for each full group of `size` tokens. `open group`: one for each token of the group that is not
    full yet.
    """

    row_bytes: int
    law: Literal["steps", "sliding", "window", "chunk", "tokens", "groups", "open group"]
    size: int = 0

    def of(self, tokens: int | None) -> int:
        """Rows after a prompt of `tokens` tokens; of one where no length is known."""
        if tokens is None:
            return self.size if self.law == "sliding" else self.of(1)
        steps = -(-tokens // KV_STEP) * KV_STEP
        match self.law:
            case "steps":
                return steps
            case "sliding":
                return min(steps, self.size)
            case "window":
                return min(self.size, tokens - 1 + KV_STEP if tokens > 2 else KV_STEP)
            case "chunk":
                return steps if tokens - 1 <= self.size else self.size + KV_STEP
            case "tokens":
                return min(tokens, self.size)
            case "groups":
                return tokens // self.size
            case "open group":
                return tokens % self.size


@dataclass(frozen=True, slots=True)
class KVBytes:
    """What a KV cache takes: `fixed_bytes` whatever its length, `step_bytes` for every 256 tokens, and `rows`."""

    fixed_bytes: int = 0
    step_bytes: int = 0
    rows: tuple[Rows, ...] = ()

    def of(self, tokens: int | None) -> int:
        """Bytes after a prompt of `tokens`, or fewer of them and the rest decoded.

        Where no length is known: of a whole sliding window, and for the first token of anything else.

        Exact for a new cache and prefill chunks of whole steps (256 tokens), for all tokens of a prompt but the
        last. A cache that goes on from an odd length can take one step more. While a chunk is computed, a window
        holds up to a chunk more: that is prefill's, not the cache's.
        """
        rows = sum(rows.of(tokens) * rows.row_bytes for rows in self.rows)
        return self.fixed_bytes + -(-(tokens or 1) // KV_STEP) * self.step_bytes + rows

    def tokens_in(self, nbytes: int) -> int:
        """The most tokens, in whole steps, whose cache takes at most `nbytes`."""
        low, high = 0, 2**24
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.of(middle * KV_STEP) <= nbytes else (low, middle - 1)
        return low * KV_STEP


@dataclass(frozen=True, slots=True)
class Plan:
    """How the memory is divided; all in bytes except `context`, `chunk_tokens` and `slots`.

    `trunk_bytes`: weights that are no routed experts. `expert_bytes`: all routed experts, wherever they are.
    `bank_bytes`: what of them has a slot. `kv_bytes`: KV cache of `context` tokens. `prefill_bytes`: room for the
    activations of a prefill chunk of `chunk_tokens`. `pool_bytes`: freed buffers that MLX may keep. `memory_bytes`:
    the budget that was divided; `reserve_bytes`: what was left beside it for the page cache and other programs, 0
    where the user set the budget. `context`: tokens, prompt and reply, or None where neither the model nor the user
    sets a bound. `model_context`: what the model was made for. `slots`: slots of each MoE layer by its path; a layer
    with all its experts is resident.
    """

    trunk_bytes: int
    expert_bytes: int
    bank_bytes: int
    kv_bytes: int
    prefill_bytes: int
    pool_bytes: int
    memory_bytes: int
    context: int | None
    model_context: int | None
    chunk_tokens: int
    slots: dict[str, int]
    reserve_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return self.trunk_bytes + self.bank_bytes + self.kv_bytes + self.prefill_bytes + self.pool_bytes

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total_bytes": self.total_bytes}


def make_plan(
    layers: Sequence[MoeLayer],
    *,
    trunk_bytes: int,
    kv: KVBytes,
    prefill: Prefill,
    context: int | None,
    model_context: int | None,
    experts: int | float | str,
    memory_bytes: int,
    reserve_bytes: int = 0,
    pool_bytes: int = POOL_BYTES,
    resident_prefill: Prefill | None = None,
    chunk_tokens: int | None = None,
) -> Plan:
    """Divide `memory_bytes` between the parts. Raises MemoryBudgetError where they do not fit, with the numbers.

    `context`: tokens that must fit, None for `model_context` or as much of it as fits. `kv`: what the cache of a
    context takes. `prefill`: what a chunk's activations take at most, however many experts are in memory, and
    `resident_prefill` with all of them: asked first, and the other only where they do not fit. `pool_bytes`: the
    least that MLX may keep of freed buffers. `chunk_tokens`: the most of a prefill chunk, by default mlx-lm's; it is
    as large if all experts fit beside it, or if it takes at most a quarter of the room beside one token's experts;
    else smaller. A context that nobody asked for takes at most that, too.
    """
    total = sum(layer.nbytes for layer in layers)
    floor = sum(layer.floor_bytes for layer in layers)
    least = expert_budget(experts, layers, auto_bytes=floor)
    room = memory_bytes - trunk_bytes
    prefill = functools.cache(prefill)  # asked for the same chunk and context on several ways
    split = _Split(context or model_context, kv, resident_prefill or prefill, pool_bytes, chunk_tokens)
    whole = total if experts == "auto" else least
    beside_all = room - total - split.kv_bytes
    # What has no room for the pool alone is not asked what prefill takes: that is slow to find out.
    if whole < total or beside_all < pool_bytes or not split.take_chunk(beside_all):
        split = _Split(context or model_context, kv, prefill, pool_bytes, chunk_tokens)
        if context is None:
            split.shrink_context((room - least) // 4)
        while not split.take_chunk(min((room - least) // 4, room - least - split.kv_bytes)):
            if context is not None or not split.halve_context():
                break  # it may fit even so, with little left for experts
    if trunk_bytes + split.nbytes + least > memory_bytes:
        said = _too_little(experts, memory_bytes, trunk_bytes, least, split)
        split = _Split(context or model_context, kv, prefill, pool_bytes, chunk_tokens)
        window = (
            ", or a smaller window=" if split.context is None and split.bound_context((room - floor) // 4) else ""
        )
        if context is None:
            split.shrink_context((room - floor) // 4)
        raise MemoryBudgetError(f"{said} {_nearest(split, trunk_bytes, floor, memory_bytes, window)}")
    plan = Plan(
        trunk_bytes=trunk_bytes,
        expert_bytes=total,
        bank_bytes=0,
        kv_bytes=split.kv_bytes,
        prefill_bytes=split.prefill_bytes,
        pool_bytes=split.pool_bytes,
        memory_bytes=memory_bytes,
        context=split.context,
        model_context=model_context,
        chunk_tokens=split.chunk_tokens,
        slots={},
        reserve_bytes=reserve_bytes,
    )
    return replan(plan, layers, experts)


def replan(plan: Plan, layers: Sequence[MoeLayer], experts: int | float | str) -> Plan:
    """`plan` with another expert budget, all else as it is. Raises MemoryBudgetError where that does not fit."""
    room = plan.memory_bytes - (plan.total_bytes - plan.bank_bytes)
    budget = expert_budget(experts, layers, auto_bytes=room)
    if budget > room:
        raise MemoryBudgetError(
            f"experts={experts!r} is {format_bytes(budget)}, but the memory budget of "
            f"{format_bytes(plan.memory_bytes)} has {format_bytes(room)} for experts beside "
            f"{format_bytes(plan.total_bytes - plan.bank_bytes)} for all else. Lower experts=, or load with more "
            f"memory= or less context=."
        )
    slots = divide_slots(budget, layers) if budget < plan.expert_bytes else {m.path: m.num_experts for m in layers}
    return replace(plan, bank_bytes=sum(slots[m.path] * m.expert_bytes for m in layers), slots=slots)


class _Split:
    """What KV cache and prefill take, and the levers: the size of prefill chunks, and the context."""

    def __init__(
        self, context: int | None, kv: KVBytes, prefill: Prefill, pool_bytes: int, most_tokens: int | None = None
    ) -> None:
        most = most_tokens or CHUNK_TOKENS[0]
        self.context = context
        self._choices = (most, *(tokens for tokens in CHUNK_TOKENS if tokens < most))
        self.chunk_tokens = most
        self.prefill_bytes = 0
        self._kv = kv
        self._prefill = prefill
        self._least_pool_bytes = pool_bytes

    @property
    def kv_bytes(self) -> int:
        return self._kv.of(self.context)

    @property
    def pool_bytes(self) -> int:
        """Freed buffers: a prefill's own would be kept whole, and half of them serve nearly as well."""
        return max(self._least_pool_bytes, self.prefill_bytes // 2)

    @property
    def nbytes(self) -> int:
        """KV cache, activations and pool together."""
        return self.kv_bytes + self.prefill_bytes + self.pool_bytes

    def take_chunk(self, room: int) -> bool:
        """Take the largest chunk whose activations and pool fit `room`; the smallest, and False, where none does."""
        choices = (
            self._choices if room >= self._least_pool_bytes else self._choices[-1:]
        )  # no need to ask for the others
        for self.chunk_tokens in choices:
            self.prefill_bytes = self._prefill(
                min(self.chunk_tokens, self.context or self.chunk_tokens), self.context
            )
            if self.prefill_bytes + self.pool_bytes <= room:
                return True
        return False

    def shrink_context(self, room: int) -> None:
        """Have no more context than whose KV cache fits `room`."""
        if self.context is not None and self.kv_bytes > room:
            self.context = min(self.context, max(KV_STEP, self._kv.tokens_in(max(0, room))))

    def bound_context(self, room: int) -> bool:
        """Have a bound where there was none, if the KV cache of a text of any length does not fit `room`."""
        if self.kv_bytes <= room:
            return False
        self.context = max(KV_STEP, self._kv.tokens_in(max(0, room)))
        return True

    def halve_context(self) -> bool:
        """Have half the context, in whole steps; False where it is one step already."""
        if self.context is None or self.context <= KV_STEP:
            return False
        self.context = max(KV_STEP, self.context // 2 // KV_STEP * KV_STEP)
        return True


def _too_little(experts: int | float | str, memory_bytes: int, trunk_bytes: int, least: int, split: _Split) -> str:
    what = "one token's experts" if experts == "auto" else f"experts={experts!r}"
    need = trunk_bytes + split.nbytes + least
    return (
        f"The memory budget is {format_bytes(memory_bytes)}, but {format_bytes(trunk_bytes)} trunk, "
        f"{format_bytes(split.kv_bytes)} KV cache for {split.context or 'any number of'} tokens, "
        f"{format_bytes(split.prefill_bytes + split.pool_bytes)} for prefill and {format_bytes(least)} for {what} "
        f"need {format_bytes(need, up=True)}."
    )


def _nearest(split: _Split, trunk_bytes: int, floor: int, memory_bytes: int, instead: str) -> str:
    """The largest context that would fit with the fewest experts, or the least memory that would do.

    `instead`: what would do as well as that context. Modifies `split`.
    """
    while True:
        split.take_chunk(memory_bytes - trunk_bytes - split.kv_bytes - floor)
        need = trunk_bytes + split.nbytes + floor
        if need <= memory_bytes:
            return f"What would fit: experts='auto' with context={split.context or KV_STEP}{instead}."
        if not split.halve_context():
            break
    return (
        f"The least that would do is memory={-(-need // 10**6)}MB with experts='auto' and "
        f"context={split.context or KV_STEP}: give it more if the machine has more, or take a smaller model."
    )
