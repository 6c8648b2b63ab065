"""A conversation and its KV cache, which sees each token once. Knows prompts and replies, not models or files."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from mlxmoe.balance import Lease
from mlxmoe.beginning import common_length
from mlxmoe.decode import Cache
from mlxmoe.errors import PromptError, RequestError, SavedStateError, brief
from mlxmoe.identity import ModelIdentity
from mlxmoe.kv.file import given_path, read_states, write_states
from mlxmoe.kv.state import CacheState
from mlxmoe.prompts import PromptEncoder
from mlxmoe.reply import Chunk, Replier, ReplyOptions, ReplySettings

if TYPE_CHECKING:
    from typing_extensions import Unpack

WHAT = "session"  # among the states that files hold
BUSY = "This session is still streaming a reply. Finish or close that stream, or open another session."


class Session:
    """A conversation. Made by `Engine.session()`.

    `messages`: what was said so far. Without a chat template the session is one text that goes on (a stop string that
    ended a reply is part of it, though it was not shown). A turn that is left early keeps the text that was streamed;
    one that streamed nothing leaves no trace.
    """

    def __init__(
        self,
        replier: Replier,
        prompts: PromptEncoder,
        lease: Lease,
        system: str | None,
        identity: Callable[[], ModelIdentity],
    ) -> None:
        if system is not None and not prompts.has_chat_template:
            raise PromptError("This model has no chat template, so it takes no system message.")
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._replier = replier
        self._prompts = prompts
        self._identity = identity
        self._text: list[int] = []  # the whole text's tokens, where there is no chat template
        self._lease = lease
        self._cache: Cache | None = None
        self._cached: list[int] = []  # the tokens the cache has seen
        self._room = 0  # tokens that it ever held: trimming gives back none of its memory
        self._turn_lock = threading.Lock()

    def stream(self, prompt: str, **options: Unpack[ReplyOptions]) -> Iterator[Chunk]:
        """Say `prompt`, and stream the reply; the options are those of Engine.stream.

        Raises PromptError or SamplingError at once, RequestError while an earlier reply is still being streamed.
        """
        settings = ReplySettings.check(**options)
        settings.sampling.refuse_beyond(self._prompts.vocab)
        if self._turn_lock.locked():
            raise RequestError(BUSY)
        return self._turn(prompt, self._turn_tokens(prompt), len(self.messages), settings)

    def generate(self, prompt: str, **options: Unpack[ReplyOptions]) -> str:
        """The whole reply as text; takes what `stream` takes."""
        return "".join(chunk.text for chunk in self.stream(prompt, **options))

    def save(self, path: str | Path) -> None:
        """Write the conversation and its KV cache to the file `path`; `Engine.restore(path)` goes on bit-identically.

        The file takes its place when it is whole and on the drive: a file that was there before is not lost to a
        full disk or a power cut. Through a link it goes where that leads; a folder, pipe or device is refused.

        Raises RequestError while a reply is being streamed, SavedStateError if it cannot be written, if `messages`
        hold what JSON has not, or if the model keeps a cache of a class that is not known.
        """
        path = given_path(path)
        with self._between_turns():
            _refuse_unsavable(self.messages)
            facts = {
                "what": WHAT,
                "model": asdict(self._identity()),
                "messages": self.messages,
                "text": self._text,
                "tokens": self._cached if self._cache is not None else [],
            }
            states = [] if self._cache is None else self._replier.decoder.states(self._cache)
            write_states(path, facts, states)

    def become(self, path: str | Path) -> None:
        """Be the conversation that `save` wrote to the file `path`: what Engine.restore asks of a new session."""
        path = given_path(path)
        with self._between_turns():
            try:
                facts, states = read_states(path, lambda facts, states: self._admit(path, facts, states))
                if states:
                    self._cache, self._cached = self._replier.decoder.restored_cache(states), facts["tokens"]
                    self._room = len(self._cached)
                self.messages, self._text = facts["messages"], facts["text"]
            finally:
                self._lease.keep(self._room if self._cache is not None else 0)

    def _admit(self, path: Path, facts: dict[str, Any], states: list[CacheState]) -> None:
        """Raise for a conversation that cannot be had, before memory is taken for it, and hold room for it."""
        if (what := facts.get("what")) != WHAT:
            raise SavedStateError(f"{path} holds a {what}, not a session. Give a file that Session.save() wrote.")
        match facts:
            case {"model": dict(model), "messages": [*_], "text": [*_], "tokens": [*tokens]}:
                self._identity().refuse_other(model, path)
            case _:
                raise SavedStateError(
                    f"{path} holds a session in a form that is not known here. Read it with the mlxmoe that wrote "
                    f"it, or begin anew."
                )
        if states:
            self._replier.decoder.refuse_misfit(states)
            self._prompts.check(tokens, reply=0)  # the context may be a smaller one
            self._lease.begin(len(tokens))

    @contextmanager
    def _between_turns(self) -> Iterator[None]:
        if self._turn_lock.locked():
            raise RequestError(BUSY)
        with self._turn_lock:  # not acquire() and try: a Ctrl-C between the two would keep it for ever
            yield

    def _turn_tokens(self, prompt: str) -> list[int]:
        """All tokens of the conversation with `prompt` at its end."""
        if self._prompts.has_chat_template:
            if not isinstance(prompt, str) or not prompt:
                raise PromptError("The prompt is empty. Give some text.")
            return self._prompts.encode_chat([*self.messages, {"role": "user", "content": prompt}])
        more = self._prompts.encode_text(prompt, goes_on=bool(self._text))
        return self._prompts.check([*self._text, *more])

    def _turn(self, prompt: str, tokens: list[int], turn: int, settings: ReplySettings) -> Iterator[Chunk]:
        """One turn, which begins when its first chunk is asked for. `turn`: messages when it was made."""
        with self._between_turns():
            if len(self.messages) != turn:
                raise RequestError("The conversation has gone on since this turn was made. Call stream() again.")
            said: list[int] = []
            reply: list[str] = []

            def heard(token: int, text: str) -> None:
                said.append(token)
                reply.append(text)

            room = self._replier.room(tokens, settings)
            self._lease.begin(max(self._room, len(tokens) + room))  # where it is refused the cache stays
            try:
                cache, seen = self._take_cache(tokens)
                try:
                    yield from self._replier.reply(tokens, settings, cache, seen, heard)
                except GeneratorExit:  # left between two passes: the cache is whole
                    self._keep_cache(cache, tokens, said)
                    raise
                self._keep_cache(cache, tokens, said)
            finally:
                self._lease.keep(self._room if self._cache is not None else 0)
                if said:
                    self.messages.append({"role": "user", "content": prompt})
                    self.messages.append({"role": "assistant", "content": "".join(reply)})
                    if self._replier.ends_text(said[-1]):
                        said.pop()  # the text goes on
                    self._text = [*tokens, *said]

    def _take_cache(self, tokens: list[int]) -> tuple[Cache, int]:
        """A cache that has seen a beginning of `tokens`, and how much; at least one token is left to see.

        It is taken out of the session until its turn ends well: a pass that fails half way leaves it torn.
        """
        cache, self._cache = self._cache, None
        if cache is not None:
            common = common_length(self._cached, tokens[:-1])
            surplus = len(self._cached) - common
            if surplus == 0:
                return cache, common
            if common and can_trim_prompt_cache(cache):
                trim_prompt_cache(cache, surplus)
                return cache, common
        self._room = 0
        return self._replier.decoder.new_cache(), 0

    def _keep_cache(self, cache: Cache, tokens: list[int], said: list[int]) -> None:
        """Give `cache` to the next turn; the token said last was not fed to it."""
        if said:
            self._cache, self._cached = cache, [*tokens, *said[:-1]]
            self._room = max(self._room, len(self._cached))


def _refuse_unsavable(messages: object) -> None:
    """Raise SavedStateError for messages that a file could not give back: a caller may have changed them."""
    try:
        if not isinstance(messages, list):
            raise TypeError(f"{type(messages).__name__} is no list")
        json.dumps(messages)
    except (TypeError, ValueError, RecursionError) as error:
        raise SavedStateError(
            f"The session's messages cannot be saved: {brief(error)}. Keep to a list of what JSON has: dict, list, "
            f"str, numbers, bool and None."
        ) from error
