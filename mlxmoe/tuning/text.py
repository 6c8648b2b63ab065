"""What a tuning decodes: English and code, the help that comes with Python. Knows no engine and no clock."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pydoc_data.topics import topics

import mlx.core as mx

from mlxmoe.sampling import Drawn, Sampler, SamplingSettings


class Text:
    """Tokens without end: the help on Python's statements and types, some 100,000 of them before it begins again."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        self._tokens = self._read()

    def take(self, count: int) -> list[int]:
        return list(islice(self._tokens, count))

    def _read(self) -> Iterator[int]:
        while True:
            for topic in topics.values():
                for piece in re.findall(r"(?s).{1,400}(?:\s|$)", topic):  # transformers warns of longer ones
                    yield from self._encode(piece)


class Reading(Sampler):
    """Draws what a text says next, whatever the model would: each token takes the work of any other."""

    def __init__(self, text: Text) -> None:
        super().__init__(SamplingSettings(seed=0))
        self._text = text

    def __call__(self, logits: mx.array, history: Sequence[int]) -> Drawn:
        drawn = super().__call__(logits, history)
        return drawn._replace(token=mx.array(self._text.take(1)[0], dtype=drawn.token.dtype))
