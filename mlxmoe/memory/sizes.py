"""Sizes as people write them, to bytes and back. Strings such as "12GB" exist only at the API's and CLI's edge."""

from __future__ import annotations

import re

from mlxmoe.errors import MemoryBudgetError

# Decimal as disks and downloads are labelled, binary where the unit says so.
_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str, what: str) -> int:
    """`12_000_000`, `"12GB"` or `"1.5 GiB"` in bytes. `what`: the argument's name, for the error's message."""
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size)) and match[2].upper() in _UNITS:
        count = int(min(float(match[1]) * _UNITS[match[2].upper()], 2.0**62))
    else:
        more = ", 'all', 'auto' or a share such as '25%'" if what == "experts" else ""
        raise MemoryBudgetError(f"{what}={size!r} is not a size. Write bytes, '12GB' or '1.5GiB'{more}.")
    if count <= 0:
        raise MemoryBudgetError(f"{what}={size!r} leaves no room at all. Write for example '12GB'.")
    return count


def parse_tokens(count: int | str) -> int:
    """`4096`, `"4096"` or `"4k"` as tokens; here a k is 1024, as context lengths are named."""
    match = re.fullmatch(r"\s*([0-9]{1,12})\s*([kKmM]?)\s*", str(count)) if not isinstance(count, bool) else None
    tokens = int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()] if match else 0
    if not 2 <= tokens < 2**40:
        raise MemoryBudgetError(
            f"context={count!r} is no number of tokens: at least 2, for a prompt and a reply; 4096 or '4k'."
        )
    return tokens


def format_bytes(count: int, *, up: bool = False) -> str:
    """Bytes for people: `12.3 GB`. `up`: rounded up, for a need that must not look as if it fitted."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if abs(count) >= unit:
            tenths = -(-count * 10 // unit) / 10 if up else count / unit
            return f"{tenths:.1f} {name}"
    return f"{count} bytes"
