"""Which code a prediction rests on, by its files. Where some of it is a user's own, that is not told.

Versions do not tell: they stay as they are while somebody works on the code, or installs it from git.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType

import mlx.nn as nn
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

# What of this package a prediction is made by, and what the questions to it are made from.
OWN = ("transients", "experts", "kv", "memory", "dividing.py", "growth.py", "opening.py", "tree.py")

_OWN_PATHS = [os.path.join(os.path.dirname(os.path.dirname(__file__)), name) for name in OWN]
_MLX_LM = os.path.join(os.path.dirname(mlx_lm.__file__), "")
_MLX = os.path.join(os.path.dirname(os.path.dirname(nn.__file__)), "")


def code_digest(classes: Iterable[type]) -> str | None:
    """Of this package's files and mlx-lm's that predictions for a model of such `classes` rest on.

    Files are told apart by size and time of change, as Python does for what it compiles: to read them takes longer.
    None for a definition, or a part of one, that is not mlx-lm's: its code may be anywhere and do anything.
    """
    names = {kind.__module__ for found in classes for kind in found.__mro__} - {"builtins"}
    files = _behind(names | {make_prompt_cache.__module__})
    if files is None:
        return None
    digest = hashlib.sha256()
    try:
        for path, state in sorted(found for root in {*_OWN_PATHS, *files} for found in _states(root)):
            digest.update(f"{path} {state.st_size} {state.st_mtime_ns}\n".encode())
    except OSError:  # an installation without sources
        return None
    return digest.hexdigest()


def _states(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Of a module's file, or of all in a folder, in the manner that asks the file system least. Raises OSError."""
    if path.endswith(".py"):
        yield path, os.stat(path)
        return
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry.path, entry.stat()
            elif entry.is_dir() and entry.name != "__pycache__":
                yield from _states(entry.path)


def _behind(names: set[str]) -> set[str] | None:
    """The files of mlx-lm behind the modules called `names`; None if one is neither of mlx-lm nor of MLX."""
    files, todo, known = set[str](), list(names), set(names)
    while todo:
        module = sys.modules.get(todo.pop())
        file = getattr(module, "__file__", None) or ""
        if module is not None and file.startswith(_MLX_LM):
            files.add(file)
            found = _definitions_in(module) - known
            todo += found
            known |= found
        elif not file.startswith(_MLX):  # whose files are as its version says
            return None
    return files


def _definitions_in(module: ModuleType) -> set[str]:
    """The modules of mlx-lm's definitions that `module` is, or has something from."""
    values = list(vars(module).values())
    names = (v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", None) for v in values)
    return {name for name in names if isinstance(name, str) and name.startswith("mlx_lm.models.")}
