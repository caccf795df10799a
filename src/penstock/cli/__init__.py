"""The command line: one thin subcommand per arrow of the design; files or flags in, a table or JSON out.

Nothing heavy is imported before a command needs it, so that `--help` answers at once. Each file beside this one adds
its commands to `app`; the order of the imports is the order of the help.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper

import typer

from penstock.cli import clusters, estimating, planning, profiling, schedules, training, weights
from penstock.cli.app import app
from penstock.errors import PenstockError
from penstock.interrupt import ending_amid_imports

__all__ = ["app", "clusters", "estimating", "main", "planning", "profiling", "schedules", "training", "weights"]


def main() -> None:
    """Run a command; an error of penstock's own is one message and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a sign gets a question mark
    try:
        with ending_amid_imports():
            app()
    except PenstockError as error:
        typer.echo(f"penstock: {error}", err=True)
        sys.exit(2)
    except MemoryError as error:
        typer.echo(f"penstock: expected a schedule that fits in memory, but got {error}; ask for less", err=True)
        sys.exit(2)
    except OSError as error:
        typer.echo(f"penstock: expected an output that can be written, but got {error.strerror}; check it", err=True)
        sys.exit(2)
