"""What chat and completions share: from a request's sampling fields to Asks, and from replies to OpenAI's fields."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from mlxmoe.reply import ReplyOptions
from mlxmoe.serving.http.problems import ApiError
from mlxmoe.serving.http.schemas import Sampling
from mlxmoe.serving.http.wire import finite
from mlxmoe.serving.jobs import Ask, ModelFacts, Spoken, Started

ANY_MODEL = "default"


def check_model(name: str, facts: ModelFacts) -> None:
    """Raises an ApiError where another model is asked for than the one there is."""
    if name not in (ANY_MODEL, facts.name):
        raise ApiError(
            404,
            f"The model {name[:200]!r} is not served here: it is {facts.name!r}, or 'default'.",
            param="model",
            code="model_not_found",
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms a request is answered. `client`: as in Ask. `max_n`: choices of one request."""

    client: str
    max_n: int

    def check(self, request: Sampling) -> None:
        if request.choices > self.max_n:
            message = f"n={request.choices} is more than this server allows: {self.max_n}."
            raise ApiError(400, message, param="n", code="invalid_value")


def options_of(request: Sampling, most_tokens: int | None, top: int | None) -> ReplyOptions:
    """OpenAI's defaults: the temperature is 1."""
    options = ReplyOptions(
        temperature=1.0 if request.temperature is None else float(request.temperature),
        top_p=1.0 if request.top_p is None else float(request.top_p),
        top_k=request.top_k or 0,
        min_p=float(request.min_p or 0.0),
        repetition_penalty=request.repetition_penalty,
        presence_penalty=float(request.presence_penalty or 0.0),
        frequency_penalty=float(request.frequency_penalty or 0.0),
        logit_bias={int(token): float(bias) for token, bias in (request.logit_bias or {}).items() if bias},
        top_logprobs=top or 0,
        seed=None if request.seed is None else request.seed % 2**64,
        stop=tuple(request.stops),
    )
    if most_tokens is not None:
        options["max_tokens"] = most_tokens
    return options


def choices_of(ask: Ask, n: int) -> list[Ask]:
    """`ask` n times, a request's first; with a seed each has one of its own, or they would all be the same."""
    seed = ask.options.get("seed")
    asks = [ask, *[replace(ask, follows=True)] * (n - 1)]
    if seed is None:
        return asks
    return [replace(one, options={**one.options, "seed": (seed + number) % 2**64}) for number, one in enumerate(asks)]


@dataclass(frozen=True, slots=True)
class Heading:
    """What every answer and every event of one request begins with."""

    id: str
    kind: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, kind: str, facts: ModelFacts) -> Heading:
        return cls(f"{prefix}-{secrets.token_hex(12)}", kind, int(time.time()), facts.name)

    def of(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


class Usage:
    """The tokens of one reply."""

    def __init__(self) -> None:
        self.prompt = 0
        self.reused = 0
        self.generated = 0
        self.reasoning = 0

    def begin(self, started: Started) -> None:
        self.prompt = started.prompt_tokens

    def count(self, spoken: Spoken, *, reasoning: bool = False) -> None:
        self.reused = spoken.chunk.reused_tokens
        self.generated = spoken.chunk.generated_tokens
        self.reasoning += reasoning


class Choice(Protocol):
    """One reply on its way to OpenAI's form. `begin` and `speak` give what a stream says of it."""

    @property
    def usage(self) -> Usage: ...

    @property
    def ended(self) -> bool: ...

    def begin(self, started: Started) -> Iterable[dict[str, Any]]: ...

    def speak(self, spoken: Spoken) -> Iterable[dict[str, Any]]: ...

    def whole(self) -> dict[str, Any]: ...


class Choices:
    """The Shape of both kinds of requests: the replies to `prompts` prompts, as many to each."""

    def __init__(self, heading: Heading, choices: Sequence[Choice], prompts: int, *, tell_usage: bool) -> None:
        self._heading = heading
        self._choices = choices
        self._prompts = prompts
        self._tell_usage = tell_usage

    def hear(self, number: int, event: Started | Spoken) -> Iterator[dict[str, Any]]:
        choice = self._choices[number]
        for piece in choice.begin(event) if isinstance(event, Started) else choice.speak(event):
            yield self._heading.of([piece], **({"usage": None} if self._tell_usage else {}))

    def wants_more(self, number: int) -> bool:
        return not self._choices[number].ended

    def last(self) -> Iterator[dict[str, Any]]:
        if self._tell_usage:
            yield self._heading.of([], usage=self._usage())

    def whole(self) -> dict[str, Any]:
        return self._heading.of([choice.whole() for choice in self._choices], usage=self._usage())

    def _usage(self) -> dict[str, Any]:
        """A prompt counts once, however many replies it has."""
        tallies = [choice.usage for choice in self._choices]
        firsts = tallies[:: len(tallies) // self._prompts]
        prompt, generated = sum(tally.prompt for tally in firsts), sum(tally.generated for tally in tallies)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(tally.reused for tally in firsts)},
            "completion_tokens_details": {"reasoning_tokens": sum(tally.reasoning for tally in tallies)},
        }


def ending_of(reason: Literal["stop", "length", "memory"]) -> dict[str, Any]:
    """A choice's fields; OpenAI knows no end by lack of memory."""
    if reason == "memory":
        return {"finish_reason": "length", "mlxmoe": {"finish_reason": "memory"}}
    return {"finish_reason": reason}


def is_said(spoken: Spoken) -> bool:
    """Whether the token is part of the reply: not the end of text, and not the lack of any. Of an Ask that wants
    `token_texts`."""
    return spoken.chunk.token >= 0 and bool(spoken.token_text or spoken.chunk.finish_reason is None)


def logprob_of(text: str, logprob: float) -> dict[str, Any]:
    """One token in chat's form."""
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}
