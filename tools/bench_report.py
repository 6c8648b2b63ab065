"""What a benchmark found: one row for each thing measured, medians with quartiles, a table. Measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Target:
    """What a value must reach: "<=" or ">=" a bound."""

    sense: Literal["<=", ">="]
    bound: float

    def reached(self, value: float) -> bool:
        return value <= self.bound if self.sense == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.sense} {self.bound:g}"


@dataclass(frozen=True)
class Row:
    """One thing measured.

    `value` in `unit` ("x": a ratio) is the median, `quartiles` those of `runs` single values. `of_limit`: our time as
    a multiple of the time that compute and reads allow at best. `exact`: whether what was computed meanwhile was
    bit-identical to mlx-lm's; None where nothing was computed. `details`: seconds, rates and hit rates behind it.
    """

    case: str
    what: str
    value: float
    unit: str
    runs: int
    quartiles: tuple[float, float] | None = None
    target: Target | None = None
    of_limit: float | None = None
    exact: bool | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool | None:
        return None if self.target is None else self.target.reached(self.value)

    @property
    def failed(self) -> bool:
        return self.reached is False or self.exact is False

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "reached": self.reached}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of one value, that value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def row_of(case: str, what: str, values: Sequence[float], unit: str = "x", **others: Any) -> Row:
    """The row of single values: their median and quartiles."""
    low, middle, high = quartiles(values)
    return Row(case, what, middle, unit, len(values), (low, high), **others)


COLUMNS = ("case", "measured", "value", "quartiles", "runs", "target", "reached", "of limit", "exact")


def table(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [COLUMNS, ("---", "---", "---:", "---", "---:", "---", "---", "---:", "---")]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*lines, *map(_cells, rows)])


def _cells(row: Row) -> tuple[str, ...]:
    unit = "" if row.unit == "x" else f" {row.unit}"
    spread = "" if row.quartiles is None or row.runs == 1 else "{:.3g} to {:.3g}".format(*row.quartiles)
    return (
        row.case,
        row.what,
        f"{row.value:.3f}" if row.unit == "x" else f"{row.value:.4g}{unit}",
        spread,
        str(row.runs),
        "" if row.target is None else str(row.target),
        _yes_no(row.reached),
        "" if row.of_limit is None else f"{row.of_limit:.2f}",
        _yes_no(row.exact),
    )


def _yes_no(value: bool | None) -> str:
    return {None: "", True: "yes", False: "NO"}[value]
