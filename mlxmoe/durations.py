"""Times as people write them, to seconds. Strings such as "90s" exist only at the API's and the CLI's edge."""

from __future__ import annotations

import re

from mlxmoe.errors import RequestError

_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}
_DURATION = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*")


def parse_duration(duration: float | str, what: str) -> float:
    """`300`, `"90s"`, `"5m"` or `"1h"` in seconds. `what`: the argument's name, for the error's message.

    Numbers are taken as they are, whatever their range. Raises RequestError for what is no time.
    """
    if isinstance(duration, int | float) and not isinstance(duration, bool):
        return float(duration)
    match = _DURATION.fullmatch(duration) if isinstance(duration, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise RequestError(f"{what}={duration!r} is no time. Write seconds, '90s', '5m' or '1h'.")
    return float(match[1]) * _UNITS[match[2].lower()]
