"""The command line: its subcommands. What they do is in the modules beside this one.

What those take of MLX and mlx-lm they import when they run, so that --help and a wrong option answer at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

import mlxmoe
from mlxmoe.cli.chat import chat
from mlxmoe.cli.doctor import doctor
from mlxmoe.cli.generate import generate
from mlxmoe.cli.models import models
from mlxmoe.cli.plan import plan
from mlxmoe.cli.profile import profile
from mlxmoe.cli.serve import serve
from mlxmoe.cli.tune import tune
from mlxmoe.cli.verify import verify

app = typer.Typer(
    name="mlxmoe",
    help="Mixture-of-Experts language models, also larger than this machine's memory, with the same words.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False,
) -> None:
    """The command's own options."""
    if version:
        typer.echo(f"mlxmoe {mlxmoe.__version__}")
        raise typer.Exit


app.command()(generate)
app.command()(chat)
app.command()(verify)
app.command()(models)
app.command()(doctor)
app.command()(profile)
app.command()(plan)
app.command()(tune)
app.command()(serve)
