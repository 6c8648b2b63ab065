"""Reuse of prompts' beginnings: where a stored state of the KV cache may stand for a prefill, and what is stored.

Knows tokens and states; what tells one model from another comes as opaque facts.

What is exact. A prefill divides a prompt into chunks of `chunk_tokens` and its last token, and where a prompt is
divided otherwise, sums may be rounded otherwise. An exact store therefore uses a state only where a fresh prefill of
this prompt would have been divided too: after a multiple of `chunk_tokens`, or, where all but the last token are the
same, before that one. Then the cache is to the bit what the fresh prefill would have made, and so is all that comes
after. With `exact=False` the longest common beginning is used wherever it ends, and replies are kept as well: the
logits agree with a fresh prefill's within rounding only.

A fresh prefill is one with as many expert slots: where their number decides which kernel computes (Metal, several
tokens), the bits are those of the prefill that was stored.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxmoe.beginning import common_length
from mlxmoe.errors import MemoryBudgetError, RequestError
from mlxmoe.kv.file import given_path
from mlxmoe.kv.folder import StateFolder
from mlxmoe.kv.forest import Forest, Node
from mlxmoe.kv.state import form, join, put, take
from mlxmoe.memory.sizes import format_bytes, parse_bytes

LEAST_TOKENS = 32  # that are worth another division of a prompt, where the store is not exact


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What a prefix store did since it was made.

    `prompts`: looked up; `hits`: of these, how many found a state; `reused_tokens`: prompt tokens that were not
    prefilled thanks to it. `states`: kept now, in memory or on disk; `nbytes` of `limit_bytes` are in memory.
    `evictions`: states given up by memory so far; `read_from_disk`: states that came from there.
    """

    prompts: int
    hits: int
    reused_tokens: int
    states: int
    nbytes: int
    limit_bytes: int
    evictions: int
    read_from_disk: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class PrefixStore:
    """States of prompts' beginnings, for one engine or several, from any thread.

    `limit`: bytes or "1GB" that states in memory may take; the least recently used are given up first. `exact`:
    whether only what gives the bits of a fresh prefill is used. `folder`: where to keep states on disk as well, for
    the next process too; there they may take `folder_limit`.

    Caches that grow token by token are stored once for all prompts that begin alike, a chunk at a time; others
    (rotating, linear attention, state space) whole at the end of each chunk, because they cannot be taken back.

    Raises MemoryBudgetError for a limit that is none, SavedStateError for a folder that cannot be made, RequestError
    for an `exact` that is neither True nor False.
    """

    def __init__(
        self,
        limit: int | str = "1GB",
        *,
        exact: bool = True,
        folder: str | Path | None = None,
        folder_limit: int | str = "20GB",
    ) -> None:
        self.limit_bytes = parse_bytes(limit, "limit")
        if not isinstance(exact, bool):
            raise RequestError(f"exact={exact!r} is not offered: True or False.")
        self.exact = exact
        folder_bytes = parse_bytes(folder_limit, "folder_limit")
        disk = None if folder is None else StateFolder(given_path(folder), folder_bytes)
        self._forest = Forest(self.limit_bytes, disk)
        self._lock = threading.RLock()  # a signal handler may ask for stats() within a pass of its thread
        self._prompts = self._hits = self._reused_tokens = 0

    def memory_beside(self, memory_bytes: int) -> int:
        """What this store leaves of a budget. Raises MemoryBudgetError where that is nothing."""
        if self.limit_bytes >= memory_bytes:
            raise MemoryBudgetError(
                f"The prefix store may take {format_bytes(self.limit_bytes)}, but the whole budget is "
                f"{format_bytes(memory_bytes)}. Give it less, or raise memory=."
            )
        return memory_bytes - self.limit_bytes

    def stats(self) -> PrefixStats:
        with self._lock:
            return PrefixStats(
                prompts=self._prompts,
                hits=self._hits,
                reused_tokens=self._reused_tokens,
                states=sum(1 for _ in self._forest),
                nbytes=self._forest.nbytes,
                limit_bytes=self.limit_bytes,
                evictions=self._forest.evictions,
                read_from_disk=self._forest.read_from_disk,
            )

    def shrink(self, nbytes: int = 0) -> int:
        """Give up states until those in memory take `nbytes` at most; the bytes given back. Those on disk stay."""
        with self._lock:
            before = self._forest.nbytes
            self._forest.evict(nbytes)
            return before - self._forest.nbytes

    def shrink_step(self) -> int:
        """Give up an eighth of the limit's bytes, if there are as many; the bytes given back."""
        return self.shrink(max(0, self._forest.nbytes - self.limit_bytes // 8))


class Prefixes:
    """What a store keeps for one model: `model` are JSON values that tell it from any other.

    `chunk_tokens`: of a prefill of it.
    """

    def __init__(self, store: PrefixStore, model: Mapping[str, Any], chunk_tokens: int) -> None:
        self.store = store
        self.chunk_tokens = chunk_tokens
        # the same model elsewhere, or by another MLX, may round otherwise: a folder may outlive both
        device = [str(mx.default_device()), str(mx.device_info().get("architecture"))]
        here = {"mlx": version("mlx"), "device": device}
        self._facts = {"model": dict(model), "chunk_tokens": chunk_tokens, "exact": store.exact, **here}

    def begin(self, tokens: Sequence[int], cache: Sequence[Any]) -> PrefixRun:
        """Put the longest stored beginning of the prompt `tokens` into the empty `cache`. Modifies `cache`.

        The last token is always left over, because its logits are wanted. MLX computes here: part of a pass.
        """
        store = self.store
        facts = {**self._facts, "form": form(cache)}
        with store._lock:
            root = store._forest.root(facts)
            while True:
                end, node = self._find(root, tokens)
                states = store._forest.states(node)
                if states is not None:
                    break
            store._forest.touch(node)
            store._prompts += 1
            store._hits += end > 0
            store._reused_tokens += end
        surplus = node.end - end
        if end:
            put([join(run, surplus) for run in zip(*states, strict=True)], cache)
            for entry in cache if surplus else ():
                entry.trim(surplus)
        above = node.parent if surplus and node.parent is not None else node
        return PrefixRun(self, above, tokens, end)

    def _find(self, root: Node, tokens: Sequence[int]) -> tuple[int, Node]:
        """How many of `tokens` a stored state may stand for, and the node that holds it and maybe more."""
        exact, last = self.store.exact, len(tokens) - 1
        best, found = 0, root
        stack = [root]
        while stack:
            node = stack.pop()
            rest = tokens[node.end : last]
            for child in node.children:
                common = common_length(child.tokens, rest)
                end, whole = node.end + common, common == len(child.tokens)
                if whole:
                    stack.append(child)
                usable = end % self.chunk_tokens == 0 or end == last if exact else end >= LEAST_TOKENS
                if end > best and usable and (whole or (child.grows and not exact)):
                    best, found = end, child
        return best, found


class PrefixRun:
    """The way of one prompt and its reply past a store. `seen`: how many of its tokens the cache has seen."""

    def __init__(self, prefixes: Prefixes, node: Node, tokens: Sequence[int], seen: int) -> None:
        self.seen = seen
        self._prefixes = prefixes
        self._node: Node | None = node  # the last that was kept; None when no more can be
        self._last = len(tokens) - 1
        self._since = list(tokens[node.end : seen])  # what the cache has seen since that node

    def note(self, tokens: Sequence[int], cache: Sequence[Any]) -> None:
        """Keep the state of `cache`, which has seen `tokens` more in one pass. MLX computes here: part of a pass."""
        store, start = self._prefixes.store, self.seen
        self.seen += len(tokens)
        self._since += tokens
        if store.exact and not self._is_a_fresh_prefills(start, self.seen):
            self._node = None
        if (node := self._node) is None or node.lost:
            return
        since = tuple(self._since)
        with store._lock:
            if (kept := node.child(since)) is not None:
                store._forest.touch(kept)
        if kept is None:
            states = take(cache, (node.end, self.seen))
            with store._lock:
                kept = store._forest.add(node, since, states)
        self._node, self._since = kept, []

    @property
    def keeps_replies(self) -> bool:
        """Whether tokens that came one by one may be noted, too: no prefill does that, so an exact store has none."""
        return not self._prefixes.store.exact

    def _is_a_fresh_prefills(self, start: int, end: int) -> bool:
        """Whether a fresh prefill of this prompt would have had a pass from `start` to `end`."""
        chunk_tokens = self._prefixes.chunk_tokens
        return start % chunk_tokens == 0 and end == min(start + chunk_tokens, self._last)
