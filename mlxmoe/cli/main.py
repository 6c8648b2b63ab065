"""How the command begins: its standard streams, Ctrl-C, and then the rest of it."""

from __future__ import annotations

import io
import os
import sys

from mlxmoe.cli import interrupts


def main() -> None:
    """Run the command line, whatever the standard streams are."""
    interrupts.end_at_once()
    _open_standard_streams()

    import logging  # these take their time, in which Ctrl-C is already heard

    from mlxmoe.cli.commands import app

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
