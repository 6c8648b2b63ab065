"""Who is next: a queue in which clients take turns, whatever each has waiting. Pure Python; not locked."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """One item of each client in turn; a client's own in the order in which they came."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Item]] = OrderedDict()  # in the order of their turns

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[Item]:
        """All, in the order in which they would be taken if nothing else came."""
        for turn in range(max(map(len, self._clients.values()), default=0)):
            for items in self._clients.values():
                if turn < len(items):
                    yield items[turn]

    def put(self, client: str, item: Item) -> None:
        self._clients.setdefault(client, deque()).append(item)

    def first(self, fits: Callable[[Item], bool] = lambda item: True) -> Item | None:
        """Whose turn it is, of those that fit; it stays."""
        return next(filter(fits, self), None)

    def take(self, item: Item) -> bool:
        """It is the turn of `item`: its client's next turn comes after the others'. Whether it was there."""
        client = self._client_of(item)
        if client is None:
            return False
        self.remove(item)
        if client in self._clients:
            self._clients.move_to_end(client)
        return True

    def remove(self, item: Item) -> bool:
        """Take `item` out, wherever it stands; whether it was there."""
        client = self._client_of(item)
        if client is None:
            return False
        self._clients[client].remove(item)
        if not self._clients[client]:
            del self._clients[client]
        return True

    def _client_of(self, item: Item) -> str | None:
        return next((client for client, items in self._clients.items() if item in items), None)

    def place(self, item: Item) -> int:
        """How many are before `item`; 0 where it is not there."""
        return next((place for place, other in enumerate(self) if other is item), 0)
