"""Times as people write them: one way for the command line and the library."""

from __future__ import annotations

from typing import Any

import pytest

from mlxmoe.durations import parse_duration
from mlxmoe.errors import RequestError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("5m", 300), ("1h", 3600), (7, 7), ("1.5 min", 90), ("0", 0), (" 2 H ", 7200), (0.5, 0.5)],
)
def test_a_time_is_seconds(text: float | str, seconds: float) -> None:
    assert parse_duration(text, "budget") == seconds


@pytest.mark.parametrize("text", ["soon", "", "s", "-5s", "1d", "1e3", "nan", "9" * 400, "5m 3s", True, None, ["5m"]])
def test_what_is_no_time_is_named_with_whose_it_was(text: Any) -> None:
    with pytest.raises(RequestError, match=r"^--keep-alive=.* is no time. Write seconds, '90s', '5m' or '1h'\.$"):
        parse_duration(text, "--keep-alive")
