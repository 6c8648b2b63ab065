"""/v1/completions: from text or token ids to Asks, and from replies to text, whole or as chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlxmoe.serving.jobs import Ask, ModelFacts, Score, Spoken, Started
from mlxmoe.serving.problems import ApiError
from mlxmoe.serving.schemas import CompletionRequest
from mlxmoe.serving.settings import MOST_CHOICES
from mlxmoe.serving.shaping import (
    Heading,
    Tally,
    check_choices,
    check_model,
    choices_of,
    ending_of,
    is_said,
    options_of,
    usage_of,
)
from mlxmoe.serving.wire import finite

DEFAULT_TOKENS = 16  # OpenAI's


def completion_asks(
    request: CompletionRequest, facts: ModelFacts, *, client: str, limit_s: float, max_n: int
) -> list[Ask]:
    """For each prompt as many as there are choices. Raises an ApiError for what this server does not do."""
    check_model(request.model, facts)
    check_choices(request, max_n)
    count = request.choices * len(request.prompts)
    if count > MOST_CHOICES:
        raise ApiError(
            400,
            f"{len(request.prompts)} prompts with n={request.choices} make {count} replies: at most {MOST_CHOICES}.",
            param="n",
            code="invalid_value",
        )
    most_tokens = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
    asks: list[Ask] = []
    for prompt in request.prompts:
        scored = most_tokens == 0 or (request.echo and (request.logprobs is not None or not isinstance(prompt, str)))
        ask = Ask(
            prompt=prompt,
            options=options_of(request, most_tokens, request.logprobs),
            score_prompt=bool(scored),
            json_schema=request.wanted_schema,
            client=client,
            limit_s=limit_s,
        )
        asks += choices_of(ask, request.choices)
    return asks


class CompletionShape:
    """Replies as `text_completion`, whole or in pieces."""

    def __init__(self, request: CompletionRequest, facts: ModelFacts) -> None:
        self._heading = Heading.new("cmpl", "text_completion", facts)
        self._usage = request.with_usage
        self._prompts = len(request.prompts)
        n = request.choices
        self._choices = [
            _Choice(index * n + number, request, prompt)
            for index, prompt in enumerate(request.prompts)
            for number in range(n)
        ]

    def hear(self, number: int, event: Started | Spoken) -> Iterator[dict[str, Any]]:
        choice = self._choices[number]
        piece = choice.begin(event) if isinstance(event, Started) else choice.speak(event)
        if piece is not None:
            yield self._heading.of([piece], **({"usage": None} if self._usage else {}))

    def wants_more(self, number: int) -> bool:
        return True

    def last(self) -> Iterator[dict[str, Any]]:
        if self._usage:
            yield self._heading.of([], usage=self._used())

    def whole(self) -> dict[str, Any]:
        return self._heading.of([choice.whole() for choice in self._choices], usage=self._used())

    def _used(self) -> dict[str, Any]:
        return usage_of([choice.tally for choice in self._choices], self._prompts)


class _Choice:
    """One reply."""

    def __init__(self, index: int, request: CompletionRequest, prompt: str | Sequence[int]) -> None:
        self.tally = Tally()
        self._index = index
        self._prompt = prompt
        self._echo = bool(request.echo)
        self._text: list[str] = []
        self._logprobs = None if request.logprobs is None else _Logprobs()
        self._ending: dict[str, Any] = {"finish_reason": None}

    def begin(self, started: Started) -> dict[str, Any] | None:
        self.tally.begin(started)
        if not self._echo:
            return None
        known = isinstance(self._prompt, str)
        text = str(self._prompt) if known else "".join(score.text for score in started.prompt)
        if self._logprobs is not None:
            for score in started.prompt:
                self._logprobs.add(score)
        return self._piece(text)

    def speak(self, spoken: Spoken) -> dict[str, Any] | None:
        """None where there is nothing to say yet."""
        chunk = spoken.chunk
        self.tally.count(spoken)
        said = is_said(spoken)
        if self._logprobs is not None and said:
            self._logprobs.add(Score(chunk.token, spoken.token_text, chunk.logprob, spoken.top))
        if chunk.finish_reason is not None:
            self._ending = ending_of(chunk.finish_reason)
        elif not chunk.text:
            return None
        return self._piece(chunk.text)

    def whole(self) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs.all()
        return {"index": self._index, "text": "".join(self._text), "logprobs": logprobs, **self._ending}

    def _piece(self, text: str) -> dict[str, Any]:
        self._text.append(text)
        logprobs = None if self._logprobs is None else self._logprobs.new()
        return {"index": self._index, "text": text, "logprobs": logprobs, **self._ending}


class _Logprobs:
    """Log-probabilities in the old form: lists side by side."""

    def __init__(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []
        self._length = 0
        self._told = 0

    def add(self, score: Score) -> None:
        self._tokens.append(score.text)
        self._logprobs.append(None if score.logprob is None else finite(score.logprob))
        self._top.append(None if score.logprob is None else {text: finite(value) for text, value in score.top})
        self._offsets.append(self._length)
        self._length += len(score.text)

    def new(self) -> dict[str, Any]:
        """What was added since this was last asked."""
        since, self._told = self._told, len(self._tokens)
        return self._from(since)

    def all(self) -> dict[str, Any]:
        return self._from(0)

    def _from(self, since: int) -> dict[str, Any]:
        return {
            "tokens": self._tokens[since:],
            "token_logprobs": self._logprobs[since:],
            "top_logprobs": self._top[since:],
            "text_offset": self._offsets[since:],
        }
