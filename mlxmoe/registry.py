"""Model types: which definitions of the installed mlx-lm hold routed experts, and which of them were checked here.

A type that is not checked works all the same if its expert modules are found by type; `mlxmoe verify` proves it on
the model at hand. Reads mlx-lm's sources as text: nothing is imported.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

# Types whose streaming is held bit-identical to stock mlx-lm by this project's own tests.
CHECKED = frozenset({"qwen3_moe", "mixtral"})

_HOLDS_EXPERTS = re.compile(r"\bSwitch(?:GLU|MLP)\(")


@dataclass(frozen=True, slots=True)
class ModelType:
    """One definition of mlx-lm with routed experts. `checked`: whether this project's tests run it."""

    name: str
    checked: bool


def moe_model_types() -> list[ModelType]:
    """Every model file of the installed mlx-lm that makes SwitchGLU or SwitchMLP experts, by name."""
    spec = importlib.util.find_spec("mlx_lm.models")
    assert spec is not None, "mlx-lm is a dependency"
    assert spec.submodule_search_locations, "mlx-lm's models are a package"
    files = sorted(Path(next(iter(spec.submodule_search_locations))).glob("*.py"))
    return [
        ModelType(file.stem, file.stem in CHECKED)
        for file in files
        if file.stem != "switch_layers" and _HOLDS_EXPERTS.search(file.read_text(encoding="utf-8"))
    ]
