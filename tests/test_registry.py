"""The registry: a table that tests back, and definitions of one's own."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3_moe
from test_layouts import CASES
from tiny import QWEN3_MOE, make_tiny

from mlxmoe import UnsupportedModelError, load, register
from mlxmoe.registry import MLX, SPECS, find_spec
from mlxmoe.verify import verify


def test_layouts_are_those_that_the_tests_read_in_place() -> None:
    tested: dict[str, set[str]] = {}
    for name, layout, *_ in CASES:
        tested.setdefault(name, set()).add(layout)
    for spec in SPECS:
        assert set(spec.layouts) == {MLX} | tested.get(spec.model_type, set()), spec.model_type


def test_types_and_aliases_are_found() -> None:
    names = [name for spec in SPECS for name in (spec.model_type, *spec.aliases)]
    assert len(set(names)) == len(names)
    assert all(find_spec(name) is not None for name in names)
    assert find_spec("llama") is None


class MyModel(qwen3_moe.Model):  # type: ignore[misc]
    """Qwen3's definition, but the experts' weights do not add up to one."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        for layer in self.model.layers:
            layer.mlp.norm_topk_prob = False


@pytest.fixture
def my_moe() -> Iterator[types.ModuleType]:
    module = types.ModuleType("my_moe")
    module.Model, module.ModelArgs = MyModel, qwen3_moe.ModelArgs  # type: ignore[attr-defined]
    yield module
    sys.modules.pop("mlx_lm.models.my_moe", None)


def test_a_definition_of_ones_own_streams_exactly(
    tmp_path: Path, my_moe: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    config = {**QWEN3_MOE, "model_type": "my_moe"}
    with pytest.raises(ValueError, match="not supported"):
        make_tiny(tmp_path / "model", config)
    register("my_moe", my_moe)
    register("my_moe", my_moe)
    folder = make_tiny(tmp_path / "model", config)
    assert verify(folder).identical
    other = make_tiny(tmp_path / "other", QWEN3_MOE)
    with load(folder, experts="25%") as mine, load(other, experts="25%") as theirs:
        assert not mx.array_equal(mine.logits([5, 6, 7]), theirs.logits([5, 6, 7]))
    reports = [record.getMessage() for record in caplog.records if "not yet checked" in record.getMessage()]
    assert reports == ["Model type my_moe is not yet checked here. `mlxmoe verify` proves it on your model."]


def test_what_is_no_definition_is_refused(my_moe: types.ModuleType) -> None:
    with pytest.raises(UnsupportedModelError, match="already"):
        register("qwen3_moe", my_moe)
    del my_moe.Model
    with pytest.raises(UnsupportedModelError, match="has no Model:"):
        register("my_moe", my_moe)
