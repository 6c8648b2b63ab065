"""What a server takes on: how much waits, how much is computed at once, how long a model is kept."""

from __future__ import annotations

from dataclasses import dataclass

from mlxmoe.errors import RequestError


@dataclass(frozen=True, slots=True)
class DeskLimits:
    """`most_waiting`: asks that wait beside those under way. `most_together`: replies under way at once.

    `max_tokens`: of a reply that does not say. `keep_alive_s`: after the last reply, until the model is unloaded;
    None: never. `exact`: every reply in passes of its own, bit for bit as `Engine.stream`. Raises RequestError.
    """

    most_waiting: int = 64
    most_together: int = 16
    max_tokens: int = 2048
    keep_alive_s: float | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        for name, least in (("most_waiting", 0), ("most_together", 1), ("max_tokens", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise RequestError(f"{name}={value!r} is out of range: a whole number, {least} or more.")
        if self.keep_alive_s is not None and not self.keep_alive_s >= 0:
            raise RequestError(f"keep_alive={self.keep_alive_s!r} is no number of seconds: 0 or more.")
