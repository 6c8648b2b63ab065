"""Requests as OpenAI's API writes them: what is taken, in which range, and what is refused by name.

A field that is not named here is passed over, as harmless. What would change the reply and is not supported is
named, and refused. What is left out has OpenAI's default, and so the temperature is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from mlxmoe.serving.http.settings import MOST_CHOICES

MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20
MOST_TOKENS = 2**31 - 1  # more is no context
MOST_PROMPTS = 8
TOKEN_KEY = r"^[0-9]{1,9}$"

# What a chat template is called with besides its own variables: not for a client to set.
RESERVED_VARIABLES = frozenset(
    (
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents",
        "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
        "tokenize", "tokenizer_kwargs", "tools", "truncation",
    )
)  # fmt: skip


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True, populate_by_name=True)


def unsupported(reason: str, *harmless: object) -> BeforeValidator:
    """Refuses whatever is given, but for null and for what is `harmless`."""

    def check(value: object) -> object:
        if value is None or any(value is same or (value == same and type(value) is type(same)) for same in harmless):
            return value
        raise PydanticCustomError("unsupported", "{reason}", {"reason": f"not supported by this server: {reason}"})

    return BeforeValidator(check)


def _own_variables(variables: dict[str, Any] | None) -> dict[str, Any] | None:
    for name in variables or {}:
        if name in RESERVED_VARIABLES:
            raise PydanticCustomError("reserved", "{name} is set by the server", {"name": name})
    return variables


def _some_at_a_time(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    """A dict, validated in parts up to the first that is wrong."""
    if not isinstance(value, dict):
        return handler(value)
    items = iter(value.items())
    checked: dict[Any, Any] = {}
    while some := dict(islice(items, 64)):
        checked |= handler(some)
    return checked


def _as_whole(value: object) -> object:
    """JSON knows no integers: 5.0 is 5, too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# One error is told: to collect those of half a million items takes seconds, for which everybody would wait.
FIRST_ERROR = Field(fail_fast=True)
FIRST_ERRORS = WrapValidator(_some_at_a_time)  # a dict has no such word

# The bounds stand within, before the validator: outside they would be kept, but be missing in the schema.
WHOLE = BeforeValidator(_as_whole)
Whole = Annotated[int, WHOLE]
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE]
Rivals = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS), WHOLE]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS), WHOLE]
TokensOrNone = Annotated[int, Field(ge=0, le=MOST_TOKENS), WHOLE]
TokenId = TokensOrNone
Text = Annotated[str, StringConstraints(min_length=1)]
Scalar = str | int | float | bool | None
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class StreamOptions(Body):
    include_usage: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class Sampling(Body):
    """What both kinds of requests have."""

    model: str = Field(description="The served model's name, or 'default'.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    temperature: float | None = Field(None, ge=0, le=2, description="1 where it is left out; 0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: TokensOrNone | None = Field(None, description="Beyond OpenAI's: 0 is off.")
    min_p: float | None = Field(None, ge=0, le=1, description="Beyond OpenAI's: 0 is off.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Beyond OpenAI's: 1 is off.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(pattern=TOKEN_KEY)],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            FIRST_ERRORS,
        ]
        | None
    ) = Field(
        None,
        description="By token id, from -100 to 100.",
        json_schema_extra={"propertyNames": {"pattern": TOKEN_KEY}},
    )
    seed: Whole | None = None
    stop: Text | Annotated[list[Text], FIRST_ERROR, Field(max_length=MOST_STOPS)] | None = None
    user: str | None = None
    response_format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None
    ) = None
    min_tokens: Annotated[None, unsupported("a least number of tokens")] = None
    ignore_eos: Annotated[Literal[False] | None, unsupported("to go on after the end of text", False)] = None
    stop_token_ids: Annotated[None, unsupported("token ids as stops; give their text as stop")] = None
    guided_json: Annotated[None, unsupported("guided_json; use response_format")] = None
    guided_regex: Annotated[None, unsupported("regular expressions")] = None
    guided_grammar: Annotated[None, unsupported("grammars")] = None
    typical_p: Annotated[None, unsupported("typical_p")] = None
    use_beam_search: Annotated[Literal[False] | None, unsupported("beam search", False)] = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def wanted_schema(self) -> dict[str, Any] | None:
        """What the reply has to be; {} for any JSON object, None for text."""
        match self.response_format:
            case JsonObjectFormat():
                return {}
            case JsonSchemaFormat(json_schema=named):
                return named.schema_ or {}
        return None


class TextPart(Body):
    type: Annotated[Literal["text"], unsupported("the model reads text only", "text")]
    text: str


Content = str | Annotated[list[TextPart], FIRST_ERROR]


class SystemMessage(Body):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Body):
    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Body):
    name: str
    arguments: str = Field(description="A JSON object.")


class CalledTool(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[CalledTool], FIRST_ERROR] | None = None
    name: str | None = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema; no parameters where it is left out.")
    strict: bool | None = None


class Tool(Body):
    type: Annotated[Literal["function"], unsupported("tools other than functions", "function")]
    function: Function


class NamedFunction(Body):
    name: Name


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    messages: Annotated[list[Message], FIRST_ERROR, Field(min_length=1)]
    max_tokens: Tokens | None = Field(None, description="The older name; the newer one wins.")
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Rivals | None = None
    tools: Annotated[list[Tool], FIRST_ERROR] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = Field(
        None, description="A call that is forced is held to the tool's parameters."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: the reply ends with its first call.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For the model's chat template."
    )
    chat_template_kwargs: Annotated[
        Annotated[dict[str, Scalar], FIRST_ERRORS] | None,
        AfterValidator(_own_variables),
        Field(
            description="Variables of the model's chat template, as enable_thinking.",
            json_schema_extra={"propertyNames": {"not": {"enum": sorted(RESERVED_VARIABLES)}}},
        ),
    ] = None
    modalities: (
        Annotated[list[Annotated[Literal["text"], unsupported("anything but text", "text")]], FIRST_ERROR] | None
    ) = None
    audio: Annotated[None, unsupported("audio")] = None
    functions: Annotated[None, unsupported("functions; use tools")] = None
    function_call: Annotated[None, unsupported("function_call; use tool_choice")] = None
    web_search_options: Annotated[None, unsupported("web search")] = None

    @property
    def with_logprobs(self) -> bool:
        return bool(self.logprobs or self.top_logprobs)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Sampling):
    prompt: (
        Text
        | Annotated[list[TokenId], FIRST_ERROR, Field(min_length=1)]
        | Annotated[list[Text], FIRST_ERROR, Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[
            list[Annotated[list[TokenId], FIRST_ERROR, Field(min_length=1)]],
            FIRST_ERROR,
            Field(min_length=1, max_length=MOST_PROMPTS),
        ]
    )
    max_tokens: TokensOrNone | None = Field(None, description="16 where it is left out.")
    logprobs: Rivals | None = None
    echo: bool | None = None
    best_of: Annotated[Literal[1] | None, unsupported("to choose among several replies", 1)] = None
    suffix: Annotated[Literal[""] | None, unsupported("to fill in before a suffix", "")] = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One or more."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
