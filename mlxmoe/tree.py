"""What a model is made of, by path, in one look: MLX's own walks take several, and build trees. Knows MLX alone.

Paths are MLX's: `layers.0.mlp`, empty for the model itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True, slots=True)
class Tree:
    """The `modules` of a model, its `parameters`, and the arrays that modules keep `beside` them (frequencies, say).

    Each in the order of definition. An array that is in two places has two paths.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    parameters: dict[str, mx.array] = field(default_factory=dict)
    beside: dict[str, mx.array] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Tree:
        tree = cls()
        tree._add_module("", model, tree.parameters)
        return tree

    @property
    def arrays(self) -> list[mx.array]:
        """Each once."""
        found = [*self.parameters.values(), *self.beside.values()]
        return list({id(array): array for array in found}.values())

    def _add_module(self, path: str, module: nn.Module, arrays: dict[str, mx.array]) -> None:
        self.modules[path] = module
        dot = f"{path}." if path else ""
        for key, value in module.items():
            parameter = not key.startswith("_") and not isinstance(value, tuple)
            self._add(((dot + key, value),), arrays if parameter else self.beside)

    def _add(self, values: Iterable[tuple[str, Any]], arrays: dict[str, mx.array]) -> None:
        for path, value in values:
            if isinstance(value, mx.array):
                arrays[path] = value
            elif isinstance(value, nn.Module):
                self._add_module(path, value, arrays)
            elif isinstance(value, dict):
                self._add(((f"{path}.{key}", part) for key, part in value.items()), arrays)
            elif isinstance(value, list | tuple):
                self._add(((f"{path}.{number}", part) for number, part in enumerate(value)), arrays)
