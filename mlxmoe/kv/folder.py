"""A folder of states that a prefix store keeps on disk, within a limit of bytes. Knows files and keys, not tokens.

Each state is a file named by its key. Two processes may use one folder: files take their place whole, and one that is
gone or torn is no more than a state that is not there. Nothing but files of such names is ever read or removed.
Whatever happens to the folder meanwhile, nothing is raised: what cannot be kept or read now is worth a warning only.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxmoe.errors import SavedStateError, TornStateError
from mlxmoe.kv.file import read_facts, read_states, write_states
from mlxmoe.kv.state import CacheState
from mlxmoe.writing import refuse_special, remove_strays

logger = logging.getLogger(__name__)

HEADER_BYTES = 2**14  # about what a file has beside its arrays
_NAME = r"[0-9a-f]{64}\.prefix"


class StateFolder:
    """The states in folder `path`, which is made if need be. Files that were not used for longest go first.

    Making one removes what killed processes left half written. Raises SavedStateError if there can be no such folder.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        try:
            path.mkdir(parents=True, exist_ok=True)
            remove_strays(path, _NAME)
        except OSError as error:
            raise SavedStateError(
                f"{path} cannot be made, or not be used: {error.strerror or error}. Choose another folder."
            ) from error

    def facts(self) -> dict[str, dict[str, Any]]:
        """The facts of each state by its key, read from the files' headers alone.

        What is torn is removed. What cannot be read now, is another version's or no regular file is left alone, with
        a warning.
        """
        found: dict[str, dict[str, Any]] = {}
        try:
            files = self._files()
        except OSError as error:
            logger.warning("No prompt's state on disk is used. %s", error)
            return found
        for file in files:
            try:
                found[file.stem] = read_facts(file)
            except SavedStateError as error:
                self._lose(file, error)
        return found

    def write(self, key: str, facts: Mapping[str, Any], states: Sequence[CacheState]) -> bool:
        """Keep `states` under `key`. False if they are over the limit or, with a warning, cannot be written."""
        nbytes = sum(state.nbytes for state in states) + HEADER_BYTES
        if nbytes > self._limit_bytes:
            return False
        try:
            self._refuse_special(self._file(key))
            self._make_room(nbytes)
            # not durable: a file that a power cut tore is noticed by its digest
            write_states(self._file(key), {**facts, "key": key}, states, durable=False)
            self._make_room(0)
            return self._file(key).exists()
        except (SavedStateError, OSError) as error:
            logger.warning("A prompt's state is not kept on disk. %s", error)
            return False

    def read(self, key: str) -> list[CacheState] | None:
        """The states under `key`; None if they are gone or, with a warning, torn or not to be read now."""
        try:
            facts, states = read_states(self._file(key))
        except SavedStateError as error:
            self._lose(self._file(key), error)
            return None
        return states if facts.get("key") == key else None

    def touch(self, keys: Sequence[str]) -> None:
        """Say that the states under `keys` were used, the last of them last."""
        for number, key in enumerate(keys, time.time_ns()):  # their order must show however coarse the clock is
            try:
                os.utime(self._file(key), ns=(number, number))
            except OSError:  # gone: whoever wants to read it will notice
                continue

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.prefix"

    def _files(self) -> list[Path]:
        return [file for file in self.path.iterdir() if re.fullmatch(_NAME, file.name)]

    def _refuse_special(self, file: Path) -> None:
        """Raise OSError for a folder, a link, a pipe: none of ours, so it is neither replaced nor written through."""
        try:
            refuse_special(file.lstat().st_mode)
        except FileNotFoundError:
            return
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file)) from error

    def _make_room(self, nbytes: int) -> None:
        """Have no more than the limit with `nbytes` more. Raises OSError where files cannot be removed."""
        sizes: dict[Path, os.stat_result] = {}
        for file in self._files():
            try:
                status = file.lstat()
            except FileNotFoundError:  # another process made room
                continue
            if stat.S_ISREG(status.st_mode):  # a folder, a link, a pipe is none of ours
                sizes[file] = status
        total = sum(status.st_size for status in sizes.values()) + nbytes
        refused: OSError | None = None
        for file in sorted(sizes, key=lambda file: sizes[file].st_mtime_ns):
            if total <= self._limit_bytes:
                return
            try:
                file.unlink(missing_ok=True)
            except OSError as error:  # perhaps this one only
                refused = error
                continue
            total -= sizes[file].st_size
        if refused is not None and total > self._limit_bytes:
            raise refused

    def _lose(self, file: Path, error: SavedStateError) -> None:
        """Remove `file` if it is torn: what cannot be read now may be whole, and others may read another version."""
        if isinstance(error.__cause__, FileNotFoundError):
            return  # another process made room
        if not isinstance(error, TornStateError) or os.path.islink(file):
            logger.warning("A prompt's state on disk is not used. %s", error)
            return
        logger.warning("A prompt's state on disk is of no use and is removed. %s", error)
        try:
            file.unlink(missing_ok=True)
        except OSError as why:
            logger.warning("%s cannot be removed: %s", file, why)
