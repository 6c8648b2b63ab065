"""The command itself: its subcommands and how it ends. What they do is in the modules beside this one."""

from __future__ import annotations

import io
import logging
import os
import sys
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


def main() -> None:
    """Run the command line, whatever the standard streams are."""
    _open_standard_streams()
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its advice is for those who write programs
    logging.getLogger("mlxmoe.memory.guard").setLevel(logging.ERROR)  # its events are shown as notes
    app()


def _open_standard_streams() -> None:
    """Closed ones lead nowhere (no file may get their number); what cannot be encoded is replaced."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
