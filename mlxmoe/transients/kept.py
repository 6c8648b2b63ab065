"""What a model's prefill was predicted to need, kept for later loads of it: a prediction can take seconds.

One small file for each model, kind of caches and code, in the user's cache folder. Knows files, not how a
prediction is made.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxmoe.errors import RequestError, SavedStateError
from mlxmoe.keeping import NO_USE, keep, kept, user_cache

FORMAT = 2
MOST = 200  # predictions in a file; those that were added first go first

logger = logging.getLogger(__name__)


class KeptPredictions:
    """Bytes that were predicted, each under a name of what for.

    `subject`: everything that they depend on, as JSON would have it, or None to keep nothing. `folder`: by default
    one of the user's cache, which is made when something is written.
    """

    def __init__(self, subject: Any, folder: Path | None = None) -> None:
        self._file = None if subject is None else _file_for(subject, folder)
        self._known = {} if self._file is None else _read(self._file)
        self._added: dict[str, int] = {}

    def of(self, name: str, predict: Callable[[], tuple[int, bool]]) -> int:
        """What is known under `name`, or else what `predict` says, which is known from now on.

        `predict`: bytes, and whether they are good for later loads too.
        """
        if name not in self._known:
            self._known[name], lasts = predict()
            if lasts:
                self._added[name] = self._known[name]
        return self._known[name]

    def save(self) -> None:
        """Add what is new to the file, with what others added since. Where that cannot be, the log says so."""
        if self._file is None or not self._added:
            return
        content = list({**_read(self._file), **self._added}.items())[-MOST:]
        try:
            keep(self._file, {"bytes": dict(content)}, FORMAT, what="predictions", without="nothing else changes")
            self._added = {}
        except SavedStateError as error:
            logger.info("%s", error)


def _file_for(subject: Any, folder: Path | None) -> Path | None:
    try:
        folder = user_cache() / "mlxmoe" / "predictions" if folder is None else folder
    except RequestError as error:  # of a user without a home folder
        logger.info("No predictions are kept: %s", error)
        return None
    return folder / f"{hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:32]}.json"


def _read(file: Path) -> dict[str, int]:
    try:
        known: dict[str, int] = kept(file, FORMAT)["bytes"]
        if not all(type(nbytes) is int and nbytes >= 0 for nbytes in known.values()):
            raise ValueError("a prediction is no number of bytes")
        return known
    except FileNotFoundError:
        return {}
    except NO_USE as error:
        logger.info("%s is made anew: %s", file, error)
        return {}
