"""From tokens to text that may be shown: whole characters only, and never a part of a stop string."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxmoe.beginning import common_length
from mlxmoe.errors import SamplingError

PROMPT_TAIL_TOKENS = 8  # enough context for the detokeniser to know whether a word or a character goes on


class TextStream:
    """Turns the tokens of one generation into pieces of text; together they are the text, with nothing broken.

    `prompt`: the prompt's tokens. The text goes on from its end, so that a leading space is kept.
    `stop`: strings that end the text: the first to be complete does. `stopped`: whether one was met; it and what
    follows it are not emitted.
    """

    def __init__(self, tokenizer: TokenizerWrapper, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._detokenizer = tokenizer.detokenizer
        for token in prompt[-PROMPT_TAIL_TOKENS:]:
            self._detokenizer.add_token(token)
        self._skip = self._unshown_part_of_the_prompt()
        self._stop = stop
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that may be shown now that `token` is known; often a word, sometimes nothing."""
        self._detokenizer.add_token(token)
        return self._release(self._detokenizer.last_segment, final=False)

    def finish(self) -> str:
        """The rest: what was held back in case a stop string went on. Half a character at the end is left out."""
        self._detokenizer.finalize()
        return self._release(self._detokenizer.last_segment.rstrip("�"), final=True)

    def _unshown_part_of_the_prompt(self) -> str:
        """What the detokeniser still holds of the prompt's end: as far as it comes out first, it is not ours."""
        self._detokenizer.last_segment  # noqa: B018  # reading it says that the prompt was shown
        whole = copy.copy(self._detokenizer)
        whole.finalize()
        return str(whole.text[len(self._detokenizer.text) :])

    def _release(self, text: str, final: bool) -> str:
        if self._skip and text:  # half a character that the prompt ended in comes out whole: that is ours
            text = text[common_length(text, self._skip) :]
            self._skip = ""
        if self.stopped:
            return ""
        self._held += text
        starts = {stop: self._held.find(stop) for stop in self._stop}
        found = [(start + len(stop), start) for stop, start in starts.items() if start >= 0]
        if found:  # the one that was complete first, however the text was cut into tokens
            self.stopped = True
            ready, self._held = self._held[: min(found)[1]], ""
            return ready
        keep = 0 if final else length_of_possible_stop(self._held, self._stop)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return ready


def check_stop(stop: str | Iterable[str]) -> tuple[str, ...]:
    """The stop strings as a tuple. Raises SamplingError for an empty one or for anything else."""
    stops = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise SamplingError(f"stop={stop!r}: every stop string must be a string of at least one character.")
    return stops


def length_of_possible_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
