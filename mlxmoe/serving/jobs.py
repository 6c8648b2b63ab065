"""What HTTP handlers ask of the thread that owns the model, and what it tells them. Knows neither HTTP nor MLX.

A handler makes an `Ask` and submits it; it gets a `Job` back, or an error at once. Then events come, from another
thread: `Started` once, `Spoken` for every token, and last a Spoken whose chunk has a finish_reason, or `Failed`.
Nothing comes after `cancel()`, but for what was on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mlxmoe.memory.reading import Pressure
from mlxmoe.prompts import Message
from mlxmoe.reply import Chunk, ReplyOptions
from mlxmoe.stats import EngineStats, MemoryUse

State = Literal["loading", "ready", "unloaded", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One reply that is wanted.

    `prompt`: chat messages, put through the model's template with `tools` and `template` (its own further variables,
    as `enable_thinking`), or plain text or token ids that go on. `options`: how it is sampled and what ends it, as
    for Engine.stream; without `max_tokens` as many as the server grants. `score_prompt`: tell the prompt's
    log-probabilities, too; then max_tokens may be 0. `token_texts`: tell what each token is by itself, which takes a
    look into the tokenizer for every one. `json_schema`: what the reply has to be, `{}` for any JSON
    object. `follows`: an earlier reply of the same request was accepted, so that this one is not refused because many
    wait. `client`: whose turn it is, where several wait.
    """

    prompt: Sequence[Message] | str | Sequence[int]
    options: ReplyOptions
    tools: Sequence[Mapping[str, Any]] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    score_prompt: bool = False
    token_texts: bool = False
    json_schema: Mapping[str, Any] | None = None
    follows: bool = False
    client: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """One token of a prompt: its text, its log-probability after those before it, and the most probable instead.

    `logprob` is None and `top` empty for the first one, which nothing came before. Where the Ask wants no
    `token_texts`, `text` and `top` are always empty.
    """

    token: int
    text: str
    logprob: float | None
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Started:
    """The reply's turn has come. `prompt`: its tokens' scores, where they were asked for. `thinks`: the prompt ends
    within the model's reasoning, so the reply begins there."""

    prompt_tokens: int
    prompt: tuple[Score, ...] = ()
    thinks: bool = False


@dataclass(frozen=True, slots=True)
class Spoken:
    """A token of the reply. `token_text`: the token by itself, empty for the end of text, which is not said. `top`:
    the most probable tokens then, with texts. Both are empty where the Ask wants no `token_texts`."""

    chunk: Chunk
    token_text: str = ""
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no more of this reply."""

    error: Exception


Event = Started | Spoken | Failed


class Job(Protocol):
    """A reply that was accepted."""

    @property
    def position(self) -> int:
        """How many are before it in the queue; 0 once its turn has come."""

    def cancel(self) -> None:
        """Nobody wants the rest: it ends within one step or one prefill chunk. May be called at any time."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a handler has to know of the model. `context`: tokens, None for a text without end.

    `reasoning`, `tool_calls`: the marks around such parts of a reply, None where the model has none.
    `parse_tool_call(text, tools)`: mlx-lm's parser for what stands between the marks: a dict with `name` and
    `arguments`, or a list of such; raises for what is none.
    """

    name: str
    created: int
    context: int | None
    has_chat_template: bool
    reasoning: tuple[str, str] | None = None
    tool_calls: tuple[str, str] | None = None
    parse_tool_call: Callable[[str, Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """The server now; all of it for who watches. `heat`: `[layers][experts]`, how much each expert was wanted lately,
    from 0 to 1; empty where nobody asked for it. `resident`: likewise whether it is in memory. `tokens_per_s`: of all
    replies together, lately. `best_batch`: replies at once beyond which more made no more tokens per second; None
    while that is not known. `accepts`: whether new work is taken, `reason` why not. `replies`, `tokens`,
    `prompt_tokens`, `refused`: since the server began."""

    state: State
    accepts: bool
    reason: str
    queued: int
    active: int
    best_batch: int | None
    pressure: Pressure
    tokens_per_s: float
    replies: int
    tokens: int
    prompt_tokens: int
    refused: int
    uptime_s: float
    memory: MemoryUse | None = None
    stats: EngineStats | None = None
    heat: tuple[tuple[float, ...], ...] = ()
    resident: tuple[tuple[bool, ...], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        own = {name: getattr(self, name) for name in self.__slots__ if name not in ("memory", "stats")}
        return {
            **own,
            "memory": None if self.memory is None else self.memory.as_dict(),
            "stats": None if self.stats is None else self.stats.as_dict(),
        }


class Desk(Protocol):
    """The thread that owns the model, as handlers see it. All may be called from any thread, and return at once."""

    @property
    def model(self) -> ModelFacts:
        """Known from before the server listens, also while the model is unloaded."""

    def submit(self, ask: Ask, tell: Callable[[Event], None]) -> Job:
        """Ask for a reply. `tell` is called by the other thread, must return at once and must not raise.

        Raises SamplingError for options that make no sense, QueueFullError where too many wait, MemoryPressureError
        while nothing new is begun, EngineClosedError while the server ends. What is wrong with the prompt, or does
        not fit, comes as Failed: a PromptError, ContextError where it is longer than the context, or
        MemoryBudgetError.
        """

    def status(self, *, heat: bool = False, whole: bool = True) -> Status:
        """What is so now. `whole`: with memory and statistics, which takes a look at the machine and a moment."""
