"""What who watches the server is told: health, and everything for the page's panel. No path of this machine."""

from __future__ import annotations

from typing import Any

from mlxmoe.serving.http.problems import without_paths
from mlxmoe.serving.http.wire import plain
from mlxmoe.serving.jobs import Desk

NOT_SERVING = ("loading", "failed", "draining")


def health(desk: Desk) -> tuple[int, dict[str, Any]]:
    """Status code and body. 503 while no request could be answered; under pressure it is 200: that passes."""
    status = desk.status(whole=False)
    serving = status.state not in NOT_SERVING
    word = status.state if not serving else "ok" if status.accepts else "refusing"
    body = {
        "status": word,
        "state": status.state,
        "accepts": status.accepts,
        "reason": without_paths(status.reason),
        "pressure": status.pressure,
        "queued": status.queued,
        "active": status.active,
    }
    return 200 if serving else 503, body


def panel(desk: Desk, *, heat: bool) -> dict[str, Any]:
    facts = desk.model
    told = {"model": {"name": facts.name, "context": facts.context}, **desk.status(heat=heat).as_dict()}
    return dict(plain(told, without_paths))
