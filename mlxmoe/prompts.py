"""From text, chat messages or token ids to the model's tokens. Knows the tokenizer, not the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxmoe.errors import ContextError, PromptError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}


@runtime_checkable
class SupportsToList(Protocol):
    """An array of MLX or NumPy."""

    def tolist(self) -> list[int]: ...


Prompt = str | Sequence[Message] | Sequence[int] | SupportsToList


NO_VARIABLES: Mapping[str, Any] = {}


class PromptEncoder:
    """Turns prompts into tokens that this model can take. Everything here raises PromptError.

    `name`: the model's, for messages. `vocab`: how many token ids it knows. `context`: tokens, prompt and reply, that
    fit, or None.
    """

    def __init__(self, tokenizer: TokenizerWrapper, name: str, vocab: int, context: int | None) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self.vocab = vocab
        self._context = context

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.has_chat_template)

    def encode(
        self,
        prompt: Prompt,
        raw: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] = NO_VARIABLES,
    ) -> list[int]:
        """The prompt's tokens, with room for a reply. Text goes through the chat template, if any, unless `raw`.

        `tools`, `template`: as for `encode_chat`.
        """
        if isinstance(prompt, str):
            if prompt and self.has_chat_template and not raw:
                return self.encode_chat([{"role": "user", "content": prompt}], tools, template)
            return self.check(self.encode_text(prompt))
        if isinstance(prompt, Sequence) and any(isinstance(item, Mapping) for item in prompt):
            return self.encode_chat(prompt, tools, template)  # type: ignore[arg-type]
        return self.check(prompt)  # type: ignore[arg-type]

    def encode_text(self, text: str, *, goes_on: bool = False) -> list[int]:
        """Plain text as tokens, with the tokenizer's own start-of-text token unless it has that or `goes_on`."""
        if not isinstance(text, str) or not text:
            raise PromptError("The prompt is empty. Give some text, messages or token ids.")
        start = self._tokenizer.bos_token
        special = not goes_on and (start is None or not text.startswith(start))
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special))
        except (UnicodeError, TypeError) as error:
            raise PromptError(
                "The prompt cannot be encoded: it holds lone surrogates, which are no text. Were they bytes that are "
                "not UTF-8?"
            ) from error

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] = NO_VARIABLES,
    ) -> list[int]:
        """Chat messages by the model's own template, up to where its reply begins.

        `tools`: what the model is told that it may call, in OpenAI's form. `template`: further variables of it.
        """
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise PromptError(f"A chat message is {{'role': ..., 'content': ...}}, not {message!r}.")
        if not self.has_chat_template:
            raise PromptError(f"{self._name} has no chat template: it takes text or token ids, not chat messages.")
        try:
            tokens = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tools=tools and list(tools), **template
            )
        except Exception as error:  # a template is a program of the model's maker: it may raise anything
            raise PromptError(f"The chat template of {self._name} refuses these messages: {error}") from error
        return self.check(tokens)

    def check(self, tokens: Sequence[int], reply: int = 1) -> list[int]:
        """`tokens` as a list, if they are tokens of this model and leave `reply` tokens of its context free."""
        if isinstance(tokens, SupportsToList):  # an array of ids, as mlx-lm takes them
            tokens = tokens.tolist()
        if not isinstance(tokens, Sequence) or isinstance(tokens, bytes | bytearray):
            raise PromptError(f"A prompt is text, chat messages or token ids, not {type(tokens).__name__}.")
        tokens = list(tokens)
        if not tokens:
            raise PromptError("The prompt is empty. Give some text, messages or token ids.")
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab:
                raise PromptError(f"{token!r} is no token of {self._name}: ids run from 0 to {self.vocab - 1}.")
        if self._context is not None and len(tokens) + reply > self._context:
            raise ContextError(
                f"The prompt has {len(tokens)} tokens, but the context is {self._context} tokens, prompt and reply "
                f"together. Shorten it, begin a new session, or load with a larger context= if the model allows."
            )
        return tokens
