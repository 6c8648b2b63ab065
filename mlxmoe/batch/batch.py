"""Continuous batching: replies that share each pass, and so each expert that is read. Knows text and memory, no HTTP.

A prompt is read alone, a chunk between two tokens of the others: in the passes that `stream` makes, or in smaller
ones where others wait for it. Its reply joins them: one pass computes the next token of every reply. The arithmetic
of a row is that of a text alone, but for the order in which a longer row's sums may be taken: log-probabilities agree
within rounding. A reply that has the model to itself gets the bits of `stream`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxmoe.balance import Lease
from mlxmoe.batch.shared import SharedCache
from mlxmoe.batch.text import Text
from mlxmoe.decode import POOL_TOKENS, Cache
from mlxmoe.errors import MemoryPressureError, MlxMoeError, brief
from mlxmoe.kv.prefix import PrefixRun
from mlxmoe.memory.plan import KV_STEP
from mlxmoe.prompts import PromptEncoder
from mlxmoe.reply import Chunk, Replier, ReplyOptions, ReplySettings
from mlxmoe.sampling import Constraint, Sampled, Sampler

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

# Of a prompt, between two tokens of others: a chunk of 2048 can take seconds. Where layers stream, each chunk reads
# most experts once, whatever its size: smaller ones would take the others as long, and more often.
POLITE_TOKENS = 512

Heard = tuple[Text, Chunk | Exception]


class Batch:
    """Replies under way, moved on by `step()`. For one thread at a time; the engine's other streams may interleave.

    `together`: one pass for all replies; else each has its own, in turns, and the bits of `stream`. `prompts`:
    what the model takes.
    """

    def __init__(
        self, replier: Replier, lease: Callable[[], Lease], *, prompts: PromptEncoder, together: bool
    ) -> None:
        self.together = together
        self._prompts = prompts
        self._replier = replier
        self._decoder = replier.decoder
        self._new_lease = lease
        self._lease = lease()  # of all that share a cache
        self._reading: list[Text] = []  # their prompts; the first one is under way
        self._speaking: list[Text] = []  # in the order of the shared cache's rows
        self._shared = SharedCache()
        self._steps = 0

    @property
    def texts(self) -> tuple[Text, ...]:
        """All under way, those that speak first."""
        return (*self._speaking, *self._reading)

    @property
    def speaking(self) -> int:
        """How many get a token in the next step, if no prompt is read to its end in it."""
        return len(self._speaking)

    def add(
        self,
        tokens: Sequence[int],
        settings: ReplySettings | None = None,
        *,
        constraint: Constraint | None = None,
        score: bool = False,
        speaks: bool = True,
        **options: Unpack[ReplyOptions],
    ) -> Text:
        """Begin a reply to the prompt `tokens`, which `Engine.encode` made; `step()` computes it.

        `options`: as for Engine.stream; or all of them as `settings`. `constraint`: what it may say. `score`: tell
        how probable the prompt was, in `Text.scores`; with `speaks` False that is all. Raises PromptError,
        SamplingError, MemoryBudgetError where no room can be made for its KV cache beside the others',
        MemoryPressureError while nothing new may begin.
        """
        tokens = self._prompts.check(tokens)
        settings = settings or ReplySettings.check(**options)
        settings.sampling.refuse_beyond(self._prompts.vocab)
        reply = self._replier.begin(tokens, settings)
        text = Text(
            reply, Sampler(settings.sampling, constraint), self._decoder.new_cache(), score=score, speaks=speaks
        )
        self._hold(text)
        self._reading.append(text)
        return text

    def step(self) -> list[Heard]:
        """Read a chunk of one prompt, and compute a token of every reply that speaks: what came of it.

        A text whose chunk has a finish_reason is over, and so is one with an error: CheckpointReadError where the
        disk failed, EngineClosedError, what its constraint says, or whatever else ends it alone. What MLX raises in
        a pass of all, as when it cannot allocate, is raised here: then nothing but `close()` is of use.
        """
        heard = [] if not self._reading else self._read(self._reading[0])
        if self._speaking:
            heard += self._speak_together() if self.together else self._speak_in_turns()
            self._steps += 1
            if self._steps % POOL_TOKENS == 0:
                mx.clear_cache()
        return heard

    def drop(self, text: Text) -> None:
        """Nobody wants the rest of `text`; its memory is given back. Nothing happens if it is over."""
        if text in self._reading:
            self._reading.remove(text)
            text.let_go()
            self._settle()
        elif text in self._speaking:
            self._leave([text])

    def close(self) -> None:
        """Drop all. Computes nothing, so that it works on what a failure has torn."""
        self._forget(list(self._speaking))
        for text in list(self._reading):
            self.drop(text)

    def _read(self, text: Text) -> list[Heard]:
        """One chunk of a prompt; with the last one the text begins to speak."""
        try:
            if text.steps is None:
                text.steps = self._begin(text)
            done = next(text.steps, None)
        except MemoryPressureError:
            self.drop(text)
            return [(text, text.reply.unsaid())]
        except Exception as error:  # MLX's own, too, as when it cannot allocate: no other text's cache is torn
            self.drop(text)
            return [(text, error)]
        if done is not None and done < len(text.unread):
            return []
        if not text.speaks:
            self.drop(text)
            return [(text, text.reply.unsaid("length"))]
        self._reading.remove(text)
        if self.together:
            with self._decoder.turn():
                self._shared.join(text.cache)
        self._speaking.append(text)
        return []

    def _begin(self, text: Text) -> Iterator[int]:
        prompt, cache = text.reply.prompt, text.cache
        if text.score:
            return self._decoder.score_steps(prompt, cache, text.sampler, text.scores)
        text.run = self._decoder.reuse(prompt, cache)
        if text.run is not None:
            text.reply.reused = text.run.seen
        return self._decoder.prefill_steps(text.unread, cache, text.run, most=self._polite_tokens)

    def _polite_tokens(self) -> int | None:
        """The most tokens of a prompt to be read while others wait for their next one."""
        polite = self.together and self._speaking and not self._decoder.streams
        return POLITE_TOKENS if polite else None

    def _speak_together(self) -> list[Heard]:
        texts = list(self._speaking)
        try:
            sampled = self._decoder.step([(text.history, text.sampler) for text in texts], self._shared.cache)
        except MlxMoeError as error:  # a pass that fails half way leaves every row torn
            self._forget(texts)
            return [(text, error) for text in texts]
        heard: list[Heard] = [(text, self._say(text, one)) for text, one in zip(texts, sampled, strict=True)]
        self._leave([text for text, what in heard if _is_last(what)])
        return heard

    def _speak_in_turns(self) -> list[Heard]:
        heard: list[Heard] = []
        for text in list(self._speaking):
            try:
                (sampled,) = self._decoder.step([(text.history, text.sampler)], text.cache)
            except Exception as error:  # MLX's own, too: each has a cache of its own
                self._forget([text])
                heard.append((text, error))
                continue
            what = self._say(text, sampled)
            heard.append((text, what))
            if _is_last(what):
                self._leave([text])
        return heard

    def _say(self, text: Text, sampled: Sampled) -> Chunk | Exception:
        if text.sampler.failed is not None:
            return text.sampler.failed
        try:
            chunk = text.reply.say(sampled, short=self._decoder.must_finish)
        except Exception as error:  # a detokeniser is another's program, and some know fewer tokens than the model
            return error
        if chunk.finish_reason is None:
            text.history.append(sampled.token)
        elif text.run is not None and text.run.keeps_replies and chunk.finish_reason != "memory":
            self._keep_for_others(text, text.run)
        return chunk

    def _keep_for_others(self, text: Text, run: PrefixRun) -> None:
        try:
            cache = self._cache_of(text)
        except Exception as error:  # MLX's own: the reply is whole all the same, and so are the others
            logger.info("A reply is not kept for other prompts: %s", brief(error))
        else:
            self._replier.keep_for_others(run, text.reply, cache)

    def _cache_of(self, text: Text) -> Cache:
        """The cache of a text that speaks, as if it had been alone."""
        if not self.together:
            return text.cache
        with self._decoder.turn():
            return self._shared.extract(self._speaking.index(text))

    def _leave(self, texts: Sequence[Text]) -> None:
        """These, which speak, are over."""
        if self.together and texts:
            with self._decoder.turn():
                self._shared.leave([self._speaking.index(text) for text in texts])
        self._end(texts)

    def _forget(self, texts: Sequence[Text]) -> None:
        """These, which speak, are over, and what they share is torn."""
        if self.together:
            self._shared = SharedCache()
        self._end(texts)

    def _end(self, texts: Sequence[Text]) -> None:
        for text in texts:
            self._speaking.remove(text)
            text.let_go()
        self._settle()

    def _hold(self, text: Text) -> None:
        """Have room for the cache of `text` beside the others'; raises what Lease.begin raises."""
        if self.together:
            texts = [*self.texts, text]
            self._lease.begin(self._longest(texts), texts=len(texts))
        else:
            text.lease = self._new_lease()  # counts as long as the text is here
            text.lease.begin(text.tokens)

    def _settle(self) -> None:
        """Hold no more room than what is under way needs."""
        self._lease.keep(self._longest(self.texts), texts=len(self.texts))

    def _longest(self, texts: Sequence[Text]) -> int:
        """Tokens that every row may come to: a batch's rows are as long as its longest, and grow in steps."""
        longest = max((text.tokens for text in texts), default=0)
        return longest + KV_STEP if len(texts) > 1 else longest


def _is_last(what: Chunk | Exception) -> bool:
    return not isinstance(what, Chunk) or what.finish_reason is not None
