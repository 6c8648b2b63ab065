"""How far two sequences begin alike. Knows nothing of what they are made of."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """How many elements two sequences (of tokens, or of characters) begin with alike."""
    pairs = zip(left, right, strict=False)
    return next((length for length, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
