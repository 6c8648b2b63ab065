"""/v1/completions: from text or token ids to Asks, and from replies to text, whole or as chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlxmoe.serving.http.problems import ApiError
from mlxmoe.serving.http.schemas import CompletionRequest
from mlxmoe.serving.http.shaping import (
    Choices,
    Heading,
    Terms,
    Usage,
    check_model,
    choices_of,
    ending_of,
    is_said,
    options_of,
)
from mlxmoe.serving.http.wire import finite
from mlxmoe.serving.jobs import Ask, ModelFacts, Score, Spoken, Started

DEFAULT_TOKENS = 16  # OpenAI's


def completion_asks(request: CompletionRequest, facts: ModelFacts, terms: Terms) -> list[Ask]:
    """For each prompt as many as there are choices. Raises an ApiError for what this server does not do."""
    check_model(request.model, facts)
    terms.check(request)
    count = request.choices * len(request.prompts)
    if count > terms.max_n:
        raise ApiError(
            400,
            f"{len(request.prompts)} prompts with n={request.choices} make {count} replies: at most {terms.max_n}.",
            param="n",
            code="invalid_value",
        )
    most_tokens = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
    asks: list[Ask] = []
    for prompt in request.prompts:
        texts = request.logprobs is not None or bool(request.echo and not isinstance(prompt, str))
        ask = Ask(
            prompt=prompt,
            options=options_of(request, most_tokens, request.logprobs),
            score_prompt=most_tokens == 0 or bool(request.echo and texts),
            token_texts=texts,
            json_schema=request.wanted_schema,
            client=terms.client,
            follows=bool(asks),
        )
        asks += choices_of(ask, request.choices)
    return asks


def completion_shape(request: CompletionRequest, facts: ModelFacts) -> Choices:
    """Replies as `text_completion`, whole or in pieces."""
    prompts = [prompt for prompt in request.prompts for _ in range(request.choices)]
    choices = [_Choice(index, request, prompt) for index, prompt in enumerate(prompts)]
    heading = Heading.new("cmpl", "text_completion", facts)
    return Choices(heading, choices, len(request.prompts), tell_usage=request.with_usage)


class _Choice:
    """One reply."""

    def __init__(self, index: int, request: CompletionRequest, prompt: str | Sequence[int]) -> None:
        self.usage = Usage()
        self._index = index
        self._prompt = prompt
        self._echo = bool(request.echo)
        self._text: list[str] = []
        self._logprobs = None if request.logprobs is None else _Logprobs()
        self._ending: dict[str, Any] = {"finish_reason": None}

    @property
    def ended(self) -> bool:
        return self._ending["finish_reason"] is not None

    def begin(self, started: Started) -> Iterator[dict[str, Any]]:
        self.usage.begin(started)
        if not self._echo:
            return
        known = isinstance(self._prompt, str)
        text = str(self._prompt) if known else "".join(score.text for score in started.prompt)
        if self._logprobs is not None:
            for score in started.prompt:
                self._logprobs.add(score)
        yield self._piece(text)

    def speak(self, spoken: Spoken) -> Iterator[dict[str, Any]]:
        chunk = spoken.chunk
        self.usage.count(spoken)
        said = is_said(spoken)
        if self._logprobs is not None and said:
            self._logprobs.add(Score(chunk.token, spoken.token_text, chunk.logprob, spoken.top))
        if chunk.finish_reason is not None:
            self._ending = ending_of(chunk.finish_reason)
        elif not chunk.text:
            return  # nothing to say yet
        yield self._piece(chunk.text)

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
