"""What was found out about a model and is kept for later loads: small JSON files in the user's cache folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxmoe.errors import RequestError, SavedStateError
from mlxmoe.writing import replacing

# What reading such a file, and making something of it, raises where anything at all may be in it.
NO_USE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def user_cache() -> Path:
    """The folder for what programs can make again: as the XDG base directories say, ~/Library/Caches on macOS.

    Raises RequestError for a user without a home folder.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the specification has relative ones ignored
        return Path(named)
    try:
        return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    except RuntimeError as error:
        raise RequestError("This user has no home folder to keep anything in. Set XDG_CACHE_HOME to one.") from error


def keep(file: Path, content: Mapping[str, Any], version: int, *, what: str, without: str) -> Path:
    """Write `content` to `file`, in the place of an older one. `without`: the command that keeps no such `what`.

    Raises SavedStateError.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, durable=False) as out:
            out.write(json.dumps({"format": version, **content}).encode())
    except OSError as error:
        raise SavedStateError(
            f"The {what} cannot be kept as {file}: {error.strerror or error}. Make room there, or go without: "
            f"{without}."
        ) from error
    return file


def kept(file: Path, version: int) -> dict[str, Any]:
    """The content of a file that `keep` wrote. Raises what NO_USE names, also for another version."""
    stored: dict[str, Any] = json.loads(file.read_bytes())
    if (found := stored.pop("format")) != version:
        raise ValueError(f"it is in version {found} of the format, and {version} is read here")
    return stored
