"""What chat and completions share: from a request's sampling fields to Asks, and from replies to OpenAI's fields."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlxmoe.reply import ReplyOptions
from mlxmoe.serving.jobs import Ask, ModelFacts, Spoken, Started
from mlxmoe.serving.problems import ApiError
from mlxmoe.serving.schemas import Sampling
from mlxmoe.serving.wire import finite

ANY_MODEL = "default"


def check_model(name: str | None, facts: ModelFacts) -> None:
    """Raises an ApiError where another model is asked for than the one there is."""
    if name not in (None, "", ANY_MODEL, facts.name):
        raise ApiError(
            404,
            f"The model {str(name)[:200]!r} is not served here: it is {facts.name!r}, or 'default'.",
            param="model",
            code="model_not_found",
        )


def check_choices(request: Sampling, most: int) -> None:
    if request.choices > most:
        raise ApiError(
            400, f"n={request.choices} is more than this server allows: {most}.", param="n", code="invalid_value"
        )


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
    """`ask` n times; with a seed each has one of its own, or they would all be the same."""
    seed = ask.options.get("seed")
    if seed is None:
        return [ask] * n
    return [replace(ask, options={**ask.options, "seed": (seed + number) % 2**64}) for number in range(n)]


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


class Tally:
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


def usage_of(tallies: list[Tally], prompts: int) -> dict[str, Any]:
    """OpenAI's usage of `prompts` prompts with as many replies each: a prompt counts once."""
    firsts = tallies[:: max(1, len(tallies) // prompts)]
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
    """Whether the token is part of the reply: not the end of text, and not the lack of any."""
    return spoken.chunk.token >= 0 and bool(spoken.token_text or spoken.chunk.finish_reason is None)


def logprob_of(text: str, logprob: float) -> dict[str, Any]:
    """One token in chat's form."""
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}
