"""Replies that have to be JSON: llguidance says which tokens may come next. Knows tokenizers, no model."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import llguidance.hf
import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxmoe.errors import RequestError, brief

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Grammars:
    """Makes constraints for one tokenizer, in any thread. `vocab`: logits of the model; it may have fewer tokens."""

    def __init__(self, tokenizer: TokenizerWrapper, vocab: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._making = threading.Lock()
        self._made: llguidance.LLTokenizer | None = None  # when it is first asked for: it walks the whole vocabulary

    def of_schema(self, schema: Mapping[str, Any], *, after: Sequence[int] = ()) -> JSONConstraint:
        """What makes a reply the JSON of `schema`, `{}` for any object; free until the tokens `after` were said.

        Raises RequestError for a schema that cannot be held to, or a tokenizer that llguidance cannot take.
        """
        try:
            # On one line: a model that is unsure what comes next would go on with line breaks, which JSON allows.
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(dict(schema) or dict(ANY_OBJECT)),
                overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
            )
            error = llguidance.LLMatcher.validate_grammar(grammar, self._tokens())
        except Exception as failed:  # another library's, of several kinds
            raise RequestError(f"This model's replies cannot be held to JSON: {brief(failed)}") from failed
        if error:
            raise RequestError(f"Replies cannot be held to this JSON schema: {' '.join(error.split())}")
        return JSONConstraint(llguidance.LLMatcher(self._tokens(), grammar, log_level=0), self._vocab, after)

    def _tokens(self) -> llguidance.LLTokenizer:
        with self._making:
            if self._made is None:
                ends = sorted(self._tokenizer.eos_token_ids)
                self._made = llguidance.hf.from_tokenizer(self._tokenizer._tokenizer, eos_token=ends)
            return self._made


class JSONConstraint:
    """A grammar's state in one reply."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int, after: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._after = list(after)
        self._free: list[int] | None = [] if after else None  # the last tokens before the grammar begins
        self.failed: RequestError | None = None

    def allowed(self) -> mx.array | None:
        """`[V]`, true for what may come next; None before the grammar begins, and once it has failed."""
        if self._free is not None or self.failed is not None:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab].astype(bool)
        if self._matcher.is_error() or not allowed.any():
            # llguidance then allows the end of the text alone: a reply that is cut off would look whole
            why = self._matcher.get_error().partition("\n")[0] or "no token of this model may come next"
            self.failed = RequestError(f"response_format: the reply cannot be held to this schema any further: {why}")
            return None
        return mx.array(np.pad(allowed, (0, self._vocab - len(allowed))))

    def took(self, token: int) -> None:
        if self._free is None:
            self._matcher.consume_token(token)
            return
        self._free = [*self._free, token][-len(self._after) :]
        if self._free == self._after:
            self._free = None
