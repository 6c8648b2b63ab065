"""The command itself: its subcommands and how it ends. What they do is in the modules beside this one."""

from __future__ import annotations

import typer

from mlxmoe.cli.chat import chat
from mlxmoe.cli.generate import generate
from mlxmoe.cli.models import models
from mlxmoe.cli.verify import verify

app = typer.Typer(
    name="mlxmoe",
    help="Mixture-of-Experts language models larger than this machine's memory: exact, and never swapping.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.command()(verify)
app.command()(models)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
