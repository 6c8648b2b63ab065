"""What an ask needs before its turn: its prompt's tokens, the room for its reply, its grammar. Touches no MLX.

A prompt of a megabyte takes seconds to become tokens, and so may a template or a grammar: threads of their own do it,
while the one that owns the engine goes on with the replies under way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mlxmoe.engine import Engine
from mlxmoe.errors import ContextError, MlxMoeError
from mlxmoe.serving.desk.grammar import Grammars
from mlxmoe.serving.desk.item import WorkItem

logger = logging.getLogger(__name__)

THREADS = 2  # one long prompt holds up no short one


class Preparing:
    """`engine`: whose tokenizer is used. `next_item()`: which ask is to be prepared next, if any. `done()`: called
    after each. Both are called by the threads that are begun here, and end with `close()`."""

    def __init__(self, engine: Engine, next_item: Callable[[], WorkItem | None], done: Callable[[], None]) -> None:
        self._engine = engine
        self._grammars = Grammars(engine.tokenizer, engine.vocab)
        self._next_item = next_item
        self._done = done
        self._threads = ThreadPoolExecutor(THREADS, "mlxmoe-prompts")

    def one_more(self) -> None:
        """Somebody waits: prepare whoever is next by then."""
        self._threads.submit(self._prepare_next)

    def close(self) -> None:
        """Returns when nothing is being prepared any more; what was not begun stays as it is."""
        self._threads.shutdown(cancel_futures=True)

    def _prepare_next(self) -> None:
        item = self._next_item()
        if item is None:
            return
        try:
            self._prepare(item)
        except MlxMoeError as error:
            item.fail(error)
        except Exception as error:  # a template or a tokenizer is another's program
            logger.exception("An ask could not be begun.")
            item.fail(error)
        self._done()

    def _prepare(self, item: WorkItem) -> None:
        """The prompt's tokens, and what follows of them; the settings as far as the context leaves them."""
        ask, engine = item.ask, self._engine
        raw = isinstance(ask.prompt, str)
        tokens = engine.encode(ask.prompt, raw=raw, tools=ask.tools, template=ask.template)
        wanted, context = item.settings.max_tokens, engine.context
        if context is not None and wanted > (left := context - len(tokens)):
            if not item.free:
                raise ContextError(
                    f"The prompt has {len(tokens)} tokens and max_tokens is {wanted}, but the context is {context} "
                    f"tokens, prompt and reply together. Lower max_tokens to {left} or less, leave it out, or "
                    f"shorten the prompt."
                )
            item.settings = item.settings.with_room(left)
        item.thinks = self._ends_thinking(tokens)
        if ask.json_schema is not None:
            after = engine.tokenizer.think_end_tokens if item.thinks else ()
            item.constraint = self._grammars.of_schema(ask.json_schema, after=after)
        item.tokens = tokens  # last: now its turn may come

    def _ends_thinking(self, tokens: list[int]) -> bool:
        """Whether the model's reasoning has begun in the prompt, and not ended."""
        tokenizer = self._engine.tokenizer
        if not tokenizer.has_thinking:
            return False
        return int(tokenizer.rfind_think_start(tokens)) > int(tokenizer.rfind_think_end(tokens))
