"""One look at a model finds what MLX's own walks find."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxmoe.opening import open_folder
from mlxmoe.tree import Tree


class Odd(nn.Module):
    """Arrays and modules wherever a definition could put them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.name = "odd"
        self.own = mx.ones(3)
        self._frequencies = mx.zeros(2)
        self._private = nn.Linear(2, 2)
        self.layers = [nn.Linear(2, 2), [nn.RMSNorm(2), mx.ones(1)], {"in": nn.Linear(2, 3), "n": 5}]
        self.pair = (nn.Linear(2, 2), mx.ones(4))
        self.tied = self.layers[0]
        self.layers[0].twice = self.own


def test_parameters_and_modules_are_those_that_mlx_finds(tiny: Path) -> None:
    for model in (Odd(), nn.Linear(2, 2), open_folder(tiny).model):
        tree, parameters = Tree.of(model), tree_flatten(model.parameters())
        assert list(tree.parameters) == [path for path, _ in parameters]
        assert all(tree.parameters[path] is array for path, array in parameters)
        modules = dict(model.named_modules())
        found = {path: module for path, module in tree.modules.items() if not path.startswith("pair")}
        assert found.keys() == modules.keys()
        assert all(found[path] is modules[path] for path in modules)


def test_what_mlx_leaves_out_is_found_beside_the_parameters() -> None:
    model = Odd()
    tree = Tree.of(model)
    assert set(tree.beside) == {
        "_frequencies", "_private.weight", "_private.bias", "pair.0.weight", "pair.0.bias", "pair.1",
    }  # fmt: skip
    assert tree.beside["_frequencies"] is model._frequencies


def test_an_array_in_two_places_is_listed_once() -> None:
    model = Odd()
    arrays = Tree.of(model).arrays
    assert len({id(array) for array in arrays}) == len(arrays)
    assert sum(array is model.own for array in arrays) == 1
    assert sum(array is model.tied.weight for array in arrays) == 1
