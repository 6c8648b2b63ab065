"""One reply of a batch: what it was asked, how far it is, and what it still needs. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mlxmoe.balance import Lease
from mlxmoe.kv.prefix import PrefixRun
from mlxmoe.reply import Reply
from mlxmoe.sampling import Sampled, Sampler

if TYPE_CHECKING:
    from mlxmoe.decode import Cache


class Text:
    """A reply under way, made by `Batch.add`.

    `scores`: how probable each of the prompt's tokens but the first was, if that was asked for, as far as the prompt
    is read. `speaks`: whether a reply follows.
    """

    def __init__(self, reply: Reply, sampler: Sampler, cache: Cache, *, score: bool, speaks: bool) -> None:
        self.reply = reply
        self.scores: list[Sampled] = []
        self.speaks = speaks
        self.score = score
        self.sampler = sampler
        self.cache = cache
        self.history: list[int] = list(reply.prompt)
        self.run: PrefixRun | None = None
        self.steps: Iterator[int] | None = None  # of the prefill, once it has begun
        self.lease: Lease | None = None  # of its own, where it shares no cache

    @property
    def tokens(self) -> int:
        """Prompt and the longest reply together."""
        return len(self.reply.prompt) + self.reply.room

    def let_go(self) -> None:
        """It is over: give back what it held."""
        self.steps, self.cache = None, []
        if self.lease is not None:
            self.lease.keep(0)

    @property
    def unread(self) -> Sequence[int]:
        """What the cache has to see before the reply can begin."""
        return self.reply.prompt[self.reply.reused : -1]
