"""Which code a prediction rests on, by its files. Where some of it is a user's own, that is not told.

Versions do not tell: they stay as they are while somebody works on the code, or installs it from git.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from types import ModuleType

import mlx.nn as nn
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

# What of this package a prediction is made by, and what the questions to it are made from.
OWN = ("transients", "experts", "kv", "memory", "dividing.py", "growth.py", "opening.py")

_MLX_LM, _MLX = Path(mlx_lm.__file__).parent, Path(nn.__file__).parents[1]


def code_digest(model: nn.Module) -> str | None:
    """Of this package's files and mlx-lm's that predictions for `model` rest on. Takes a few milliseconds.

    Files are told apart by size and time of change, as Python does for what it compiles: to read them takes longer.
    None for a definition, or a part of one, that is not mlx-lm's: its code may be anywhere and do anything.
    """
    types = {type(module) for module in model.modules()} | {type(getattr(model, "args", 0))}
    names = {kind.__module__ for found in types for kind in found.__mro__} - {"builtins"}
    files = _behind(names | {make_prompt_cache.__module__})
    if files is None:
        return None
    digest = hashlib.sha256()
    try:
        for file in sorted(_own_files() | files):
            state = os.stat(file)
            digest.update(f"{file} {state.st_size} {state.st_mtime_ns}\n".encode())
    except OSError:  # an installation without sources
        return None
    return digest.hexdigest()


def _own_files() -> set[Path]:
    package = Path(__file__).parents[1]
    rooms, modules = ([package / name for name in OWN if name.endswith(".py") == single] for single in (False, True))
    return {*modules, *(file for room in rooms for file in room.rglob("*.py"))}


def _behind(names: set[str]) -> set[Path] | None:
    """The files of mlx-lm behind the modules called `names`; None if one is neither of mlx-lm nor of MLX."""
    files, todo, known = set(), list(names), set(names)
    while todo:
        module = sys.modules.get(todo.pop())
        file = Path(getattr(module, "__file__", None) or "")
        if module is not None and file.is_relative_to(_MLX_LM):
            files.add(file)
            found = _definitions_in(module) - known
            todo += found
            known |= found
        elif not file.is_relative_to(_MLX):  # whose files are as its version says
            return None
    return files


def _definitions_in(module: ModuleType) -> set[str]:
    """The modules of mlx-lm's definitions that `module` is, or has something from."""
    values = list(vars(module).values())
    names = (v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", None) for v in values)
    return {name for name in names if isinstance(name, str) and name.startswith("mlx_lm.models.")}
