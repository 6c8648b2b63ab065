"""mlxmoe models: which model types were checked."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mlxmoe.cli import common
from mlxmoe.registry import SPECS, markdown_table


@common.reported
def models(
    markdown: Annotated[bool, typer.Option("--markdown", help="As the README shows it.")] = False,
    debug: common.Debug = False,
) -> None:
    """List the model types with routed experts whose streaming is held bit-identical to mlx-lm by the tests."""
    out = Console(highlight=False)
    if markdown:
        out.print(markdown_table(), markup=False, soft_wrap=True, end="")
        return
    table = Table("model type", "also", "beside routed experts", "read in place")
    for spec in SPECS:
        table.add_row(spec.model_type, " ".join(spec.aliases), spec.traits, ", ".join(spec.layouts))
    out.print(table)
    out.print(
        f"Installed: mlx-lm {version('mlx-lm')}. A type that is not here works if its experts are SwitchGLU or "
        f"SwitchMLP modules: `mlxmoe verify` proves it on your model."
    )
