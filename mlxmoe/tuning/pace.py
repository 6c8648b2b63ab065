"""How long a full context takes to fill and to decode with, by what shorter ones took. Pure arithmetic."""

from __future__ import annotations

PASSES = 3  # that show a speed: one that warms up, and two
MARGIN = 1.5  # what outgrows the processor's caches, or is new to the process, takes more than its length says


class Pace:
    """Notes what was seen, and bounds what was not: a context takes no less than a shorter one, and hardly more than
    MARGIN times in proportion to its length."""

    def __init__(self) -> None:
        self._fill_s: dict[int, float] = {}  # tokens -> seconds
        self._pass_s: dict[int, float] = {}

    @property
    def longest(self) -> int:
        """The most tokens of which anything was noted; 0 for nothing."""
        return max(self._pass_s, default=0)

    def note(self, tokens: int, fill_s: float, pass_s: float) -> None:
        """A context of `tokens` took `fill_s` to fill, and each token after it `pass_s`."""
        self._fill_s[tokens], self._pass_s[tokens] = fill_s, pass_s

    def fill_s(self, tokens: int) -> float:
        """Seconds to fill a context, at most. Something must have been noted."""
        return _bound(self._fill_s, tokens)

    def pass_s(self, tokens: int) -> float:
        """Seconds of a decoded token after `tokens`, at most. Something must have been noted."""
        return _bound(self._pass_s, tokens)

    def needed_s(self, tokens: int) -> float:
        """Seconds to fill a context and to see how fast it is, at most."""
        return self.fill_s(tokens) + PASSES * self.pass_s(tokens)

    def reach(self, seconds: float) -> int:
        """The most tokens for which `seconds` are enough: the longest that was noted, doubled again and again."""
        tokens = self.longest
        while self.needed_s(2 * tokens) <= seconds:
            tokens *= 2
        return tokens


def _bound(noted: dict[int, float], tokens: int) -> float:
    bounds = [took if tokens <= seen else took * MARGIN * tokens / seen for seen, took in noted.items()]
    return min(bounds)
