"""Who is next: a queue in which clients take turns, whatever each has waiting. Pure Python; not locked."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
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

    def first(self) -> Item | None:
        """Whose turn it is; it stays."""
        return next(iter(self), None)

    def take(self) -> Item:
        """Whose turn it is; its client's next turn comes after the others'."""
        client, items = next(iter(self._clients.items()))
        item = items.popleft()
        if items:
            self._clients.move_to_end(client)
        else:
            del self._clients[client]
        return item

    def remove(self, item: Item) -> bool:
        """Take `item` out, wherever it stands; whether it was there."""
        for client, items in self._clients.items():
            if item in items:
                items.remove(item)
                if not items:
                    del self._clients[client]
                return True
        return False

    def place(self, item: Item) -> int:
        """How many are before `item`; 0 where it is not there."""
        return next((place for place, other in enumerate(self) if other is item), 0)
