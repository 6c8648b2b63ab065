"""mlxmoe models: which model types can stream."""

from __future__ import annotations

from importlib.metadata import version

from rich.console import Console
from rich.table import Table

from mlxmoe.cli import common
from mlxmoe.registry import moe_model_types


@common.reported
def models(debug: common.Debug = False) -> None:
    """List the model types with routed experts that the installed mlx-lm defines."""
    out = Console(highlight=False)
    table = Table("model type", "checked")
    for kind in moe_model_types():
        table.add_row(kind.name, "bit-identical in the tests" if kind.checked else "not yet: run mlxmoe verify")
    out.print(table)
    out.print(f"From mlx-lm {version('mlx-lm')}. The model type stands in a model's config.json.")
