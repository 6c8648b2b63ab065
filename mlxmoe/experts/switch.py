"""mlx-lm's switch layers, the modules that hold routed experts: finding them, and exchanging what their calls do.

Found by type, never by an attribute's name. A module keeps its place in the model and its parameters' names; what
changes is its class, to a subclass of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from mlxmoe.experts.slots import Home
from mlxmoe.tree import Tree

SWITCH_TYPES = (SwitchGLU, SwitchMLP)
LINEAR_TYPES = (SwitchLinear, QuantizedSwitchLinear)


def switch_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of `model` that holds routed experts, by its path, in the order of the layers."""
    return switches_of(Tree.of(model).modules)


def switches_of(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of a model's `modules` that hold routed experts, in the order of the layers."""
    found = {path: module for path, module in modules.items() if isinstance(module, SWITCH_TYPES)}
    return dict(sorted(found.items(), key=lambda item: _by_number(item[0])))


def expert_homes(module: nn.Module) -> dict[str, Home]:
    """Where a switch module's arrays with one row for each expert live, by their path inside the module."""
    return {
        f"{name}.{key}": Home(child, key)
        for name, child in sorted(module.children().items())
        if isinstance(child, LINEAR_TYPES)
        for key in child.parameters()
    }


def expert_arrays(module: nn.Module) -> dict[str, mx.array]:
    """The arrays of a switch module that have one row for each expert, by their path inside the module."""
    return {name: home.array for name, home in expert_homes(module).items()}


def mixed(mixin: type, stock: type) -> type:
    """A subclass of `stock` whose calls go through `mixin`; `stock_class` leads back."""
    return type(f"{mixin.__name__.strip('_')}{stock.__name__}", (mixin, stock), {"stock_class": stock})


class Passing:
    """Of mixins that a switch module has within a pass only."""


def settle(module: nn.Module) -> None:
    """Have `module` be what it is between two passes, whatever Ctrl-C left of the one before."""
    if not issubclass(type(module), Passing):
        return
    mixins, kind = [], type(module)
    while "stock_class" in vars(kind):
        mixins.append(kind.__bases__[0])
        kind = vars(kind)["stock_class"]
    for mixin in reversed(mixins):
        if not issubclass(mixin, Passing):
            kind = mixed(mixin, kind)
    module.__class__ = kind


class Hearing(Passing):
    """Mixed in before a switch layer's class: notes its indices, computes nothing, returns zeros."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self.__dict__["heard"] = indices  # not as an attribute: a module takes an array for a parameter
        return mx.zeros((*indices.shape, x.shape[-1]), dtype=x.dtype)


class Listening:
    """Within this context, switch modules note their top_k and compute nothing.

    After a forward pass that is never evaluated, `top_k[path]` holds what each reached module heard.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._classes: dict[str, type] = {}
        self.top_k: dict[str, int] = {}

    def __enter__(self) -> Listening:
        hearing: dict[type, type] = {}
        for path, module in self._modules.items():
            self._classes[path] = kind = type(module)
            module.__class__ = hearing.get(kind) or hearing.setdefault(kind, mixed(Hearing, kind))
        return self

    def __exit__(self, *_: Any) -> None:
        for path, module in self._modules.items():
            module.__class__ = self._classes[path]
            heard = module.__dict__.pop("heard", None)
            if heard is not None:
                self.top_k[path] = int(heard.shape[-1])


def _by_number(path: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 behind layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
