"""The replies under way on one loaded engine: prepared asks become texts of a batch, and what comes of them is told.

All of it happens in the thread that loaded the engine.
"""

from __future__ import annotations

import logging
import time

from mlxmoe.batch.batch import Batch
from mlxmoe.batch.text import Text
from mlxmoe.engine import Engine
from mlxmoe.errors import MemoryBudgetError, MemoryPressureError, MlxMoeError
from mlxmoe.reply import Chunk
from mlxmoe.serving.desk.heat import Heat
from mlxmoe.serving.desk.item import WorkItem
from mlxmoe.serving.desk.limits import DeskLimits
from mlxmoe.serving.desk.pace import Pace
from mlxmoe.serving.desk.preparing import Preparing
from mlxmoe.serving.desk.tally import Tally
from mlxmoe.serving.jobs import Failed, ModelFacts, Score, Spoken, Started

logger = logging.getLogger(__name__)


class Work:
    """`engine` and its batch. `items`: the replies under way. `preparing`: those that wait."""

    def __init__(self, engine: Engine, limits: DeskLimits, tally: Tally, preparing: Preparing) -> None:
        self.engine = engine
        self.preparing = preparing
        self.pace = Pace(limits.most_together)
        self.heat = Heat(engine, engine.num_experts)
        self.items: dict[Text, WorkItem] = {}
        self._tally = tally
        self._batch: Batch = engine.batch(together=False if limits.exact else None)

    def facts(self, name: str, created: int) -> ModelFacts:
        """What handlers have to know of the model."""
        tokenizer = self.engine.tokenizer
        reasoning = (tokenizer.think_start, tokenizer.think_end) if tokenizer.has_thinking else None
        calls = (tokenizer.tool_call_start, tokenizer.tool_call_end or "") if tokenizer.has_tool_calling else None
        return ModelFacts(
            name=name,
            created=created,
            context=self.engine.context,
            has_chat_template=bool(tokenizer.has_chat_template),
            reasoning=reasoning,
            tool_calls=calls,
            parse_tool_call=tokenizer.tool_parser if calls else None,
        )

    def drop_cancelled(self) -> None:
        """Nobody wants these any more: their memory is given back."""
        for text in [text for text, item in self.items.items() if item.cancelled]:
            del self.items[text]
            self._tally.note_activity()
            try:
                self._batch.drop(text)
            except Exception as error:  # those that stay are put together anew, which takes memory
                self._fail_all(error)
                return

    def begin(self, item: WorkItem) -> bool:
        """Let `item`, which is prepared, have its turn, or end it with what is wrong; False where memory is short."""
        tokens, ask = item.tokens, item.ask
        assert tokens is not None, "only what is prepared has a turn"
        try:
            text = self._batch.add(
                tokens, item.settings, constraint=item.constraint, score=ask.score_prompt, speaks=item.speaks
            )
        except MemoryPressureError:
            return False
        except MemoryBudgetError as error:
            if self.items:
                return False  # there is room for it once others are over
            item.tell(Failed(error))
        except MlxMoeError as error:
            item.tell(Failed(error))
        except Exception as error:  # a detokeniser is another's program
            logger.exception("An ask could not be begun.")
            item.tell(Failed(error))
        else:
            item.began_s = time.monotonic()
            self.items[text] = item
            self._tally.prompt_tokens += len(tokens)
            if not ask.score_prompt:
                item.start(Started(len(tokens), thinks=item.thinks))
        return True

    def step(self) -> bool:
        """Compute a step of all replies and tell what came of it; False where there are none."""
        if not self.items:
            return False
        size, reading = self._batch.speaking, len(self.items) - self._batch.speaking
        start = time.monotonic()
        try:
            with self.heat.recorded():
                heard = self._batch.step()
        except Exception as error:  # MLX's own, as when it cannot allocate
            self._fail_all(error)
            return True
        if size and not reading and len(heard) == size:
            self.pace.note(size, time.monotonic() - start)
        for text, what in heard:
            self._pass_on(text, what)
        self._tally.note_tokens(sum(isinstance(what, Chunk) and what.token >= 0 for _, what in heard))
        return True

    def close(self, error: MlxMoeError) -> None:
        """End what is under way with `error`, and give the engine's memory back."""
        self.preparing.close()  # first: no other thread may be the last to hold the engine
        self._end_all(error)
        self.engine.close()

    def _pass_on(self, text: Text, what: Chunk | Exception) -> None:
        item = self.items[text]
        try:
            self._tell(text, item, what)
        except Exception as error:  # a tokenizer is another's program, and some know fewer tokens than the model
            logger.exception("A token cannot be told.")
            item.tell(Failed(error))
            item.cancel()  # it goes before the next step
        if not isinstance(what, Chunk) or what.finish_reason is not None:
            del self.items[text]
            self._tally.note_reply(time.monotonic() - item.began_s)

    def _tell(self, text: Text, item: WorkItem, what: Chunk | Exception) -> None:
        if not isinstance(what, Chunk):
            item.tell(Failed(what))
            return
        if not item.started:  # the prompt is read: its scores are known
            item.start(Started(len(text.reply.prompt), self._scores(text, item), item.thinks))
        if not item.ask.token_texts:
            item.tell(Spoken(what))
            return
        ended = what.token < 0 or what.token in self.engine.tokenizer.eos_token_ids
        item.tell(Spoken(what, "" if ended else self._text_of(what.token), self._told(what.top_logprobs)))

    def _scores(self, text: Text, item: WorkItem) -> tuple[Score, ...]:
        first, scores = text.reply.prompt[0], text.scores
        if not item.ask.token_texts:
            return (Score(first, "", None, ()), *(Score(one.token, "", one.logprob, ()) for one in scores))
        return (
            Score(first, self._text_of(first), None, ()),
            *(Score(one.token, self._text_of(one.token), one.logprob, self._told(one.top)) for one in scores),
        )

    def _told(self, top: tuple[tuple[int, float], ...]) -> tuple[tuple[str, float], ...]:
        return tuple((self._text_of(token), logprob) for token, logprob in top)

    def _text_of(self, token: int) -> str:
        return str(self.engine.tokenizer.decode([token]))

    def _fail_all(self, error: Exception) -> None:
        """The replies under way are over, the server goes on."""
        logger.error("The replies under way have failed.", exc_info=error)
        self._end_all(error)

    def _end_all(self, error: Exception) -> None:
        items, self.items = list(self.items.values()), {}
        self._batch.close()
        for item in items:
            item.tell(Failed(error))
