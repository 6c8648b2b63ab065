"""States that hang on one another: in memory within a limit, and on disk where there is a folder for them.

A tree belongs to whatever its root's facts say; a node holds the state after the tokens from its root to it, or only
what they add to its parent's. So what is given up first is what was used longest ago and has nothing hanging on it.
Knows nothing of prompts or prefill, and has no lock: one caller at a time.

A Ctrl-C may come between any two lines. So what is in memory and what was given up is seen from the tree itself, and
not kept beside it: each change of the tree is one step, after which nothing has to be put right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxmoe.kv.folder import StateFolder
from mlxmoe.kv.state import CacheState


@dataclass(eq=False, slots=True)
class Node:
    """A state after `end` tokens: those above it and its own `tokens`.

    `states`: None at a root, and where it is on disk only; `size`: their bytes when they were last there. `grows`: it
    can be cut off at any of its own tokens. `used`: when, by the forest's clock.
    """

    key: str
    tokens: tuple[int, ...] = ()
    parent: Node | None = None
    states: Sequence[CacheState] | None = None
    on_disk: bool = False
    grows: bool = False
    used: int = 0
    size: int = 0
    end: int = field(init=False)
    children: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = len(self.tokens) + (self.parent.end if self.parent is not None else 0)

    @property
    def chain(self) -> list[Node]:
        """From below the root down to this node; empty for a root."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def below(self) -> Iterator[Node]:
        """This node and all that hangs on it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children

    @property
    def nbytes(self) -> int:
        """In memory."""
        return 0 if self.states is None else self.size

    @property
    def lost(self) -> bool:
        """Whether it was given up, or never kept: nothing may hang on it any more."""
        return any(one not in one.parent.children for one in self.chain if one.parent is not None)

    def child(self, tokens: tuple[int, ...]) -> Node | None:
        return next((child for child in self.children if child.tokens == tokens), None)


class Forest:
    """`limit_bytes`: of the states in memory. `folder`: where every state is kept as well, if given.

    `evictions`, `read_from_disk`: states so far.
    """

    def __init__(self, limit_bytes: int, folder: StateFolder | None) -> None:
        self.limit_bytes = limit_bytes
        self.evictions = 0
        self.read_from_disk = 0
        self._folder = folder
        self._roots: dict[str, Node] = {}
        self._clock = 0

    def __iter__(self) -> Iterator[Node]:
        """Every node but the roots."""
        return (node for root in self._roots.values() for node in root.below if node is not root)

    @property
    def nbytes(self) -> int:
        """In memory now, never more than the limit."""
        return sum(node.nbytes for node in self)

    def root(self, facts: Mapping[str, Any]) -> Node:
        """The root of the tree for `facts`, with what is on disk below it."""
        key = _digest(facts)
        if key not in self._roots:
            root = Node(key)
            if self._folder is not None:
                self._hang_from_disk(root, self._folder)
            self._roots[key] = root
        return self._roots[key]

    def touch(self, node: Node) -> None:
        """Say that `node` was used. What it hangs on counts as used after it, so that it is given up later."""
        chain = node.chain
        self._clock += len(chain)
        for below, one in enumerate(chain):  # from the top down: at no time is a node older than what hangs on it
            one.used = self._clock - below
        if self._folder is not None:
            self._folder.touch([one.key for one in reversed(chain) if one.on_disk])

    def add(self, parent: Node, tokens: tuple[int, ...], states: Sequence[CacheState]) -> Node | None:
        """Keep `states` after `tokens` more than `parent`'s; None if there is no room, or `parent` was given up."""
        if parent.lost:
            return None
        if (known := parent.child(tokens)) is not None:
            self.touch(known)
            return known
        grows = all(state.grows for state in states)
        node = Node(_child_key(parent, tokens), tokens, parent, grows=grows)
        held = self._hold(node, states, keep=node.chain)
        if self._folder is not None:
            facts = {"what": "prefix", "parent": parent.key, "tokens": tokens, "grows": grows}
            node.on_disk = self._folder.write(node.key, facts, states)
        if not held and not node.on_disk:
            return None
        parent.children.append(node)
        self.touch(node)
        return node

    def states(self, node: Node) -> list[Sequence[CacheState]] | None:
        """The states of `node` and all it hangs on, from the top down; None if one is lost, and then so is `node`."""
        chain, found = node.chain, []
        for one in chain:
            states = one.states
            if states is None:
                states = self._folder.read(one.key) if self._folder is not None else None
                if states is None:
                    self._forget(one)
                    return None
                self.read_from_disk += 1
                self._hold(one, states, keep=chain)
            found.append(states)
        return found

    def evict(self, limit_bytes: int, keep: Sequence[Node] = ()) -> None:
        """Give up states until those in memory take `limit_bytes` at most, or there is nothing left but `keep`."""
        while self.nbytes > limit_bytes:
            held = [node for node in self if node.states is not None and node not in keep]
            if not held:
                return
            node = min(held, key=lambda node: node.used)  # nothing hangs on it: that was used before it, see touch
            self.evictions += 1
            if node.on_disk:
                node.states = None
            else:
                self._forget(node)

    def _hold(self, node: Node, states: Sequence[CacheState], keep: Sequence[Node]) -> bool:
        """Keep `states` in memory if there is room for them beside `keep`."""
        nbytes = sum(state.nbytes for state in states)
        if nbytes > self.limit_bytes:
            return False
        self.evict(self.limit_bytes - nbytes, keep)
        if self.nbytes + nbytes > self.limit_bytes:
            return False
        node.size = nbytes  # first: with states, it counts
        node.states = states
        return True

    def _forget(self, node: Node) -> None:
        """Cut off a node, and what hangs on it with it."""
        assert node.parent is not None, "a root is never forgotten"
        node.parent.children.remove(node)
        for one in node.below:  # a run may hold on to a node, and need not to its states
            one.states = None

    def _hang_from_disk(self, root: Node, folder: StateFolder) -> None:
        """Hang below `root` what belongs there. A header that does not give the file's own name is not believed."""
        waiting: dict[str, list[tuple[str, tuple[int, ...], bool]]] = {}
        for key, facts in folder.facts().items():
            match facts:
                case {"parent": str(above), "tokens": [*tokens], "grows": bool(grows)}:
                    waiting.setdefault(above, []).append((key, tuple(tokens), grows))
        stack = [root]
        while stack:
            parent = stack.pop()
            for key, added, grows in waiting.get(parent.key, ()):
                if added and key == _child_key(parent, added):
                    parent.children.append(Node(key, added, parent, on_disk=True, grows=grows))
            stack += parent.children


def _child_key(parent: Node, tokens: Sequence[int]) -> str:
    return _digest([parent.key, list(tokens)])


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
