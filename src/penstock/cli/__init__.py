"""The command line: each command takes files or flags and prints a table or JSON.

Large modules are imported when a command needs them, so that `--help` is fast. Each module of this package adds its
commands to `app`; the order of the imports is the order of the help.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import NoReturn

import typer

from penstock.cli import clusters, estimating, planning, profiling, schedules, training, weights
from penstock.cli.app import app
from penstock.errors import PenstockError
from penstock.interrupt import exit_on_interrupt_during_imports

__all__ = ["app", "clusters", "estimating", "main", "planning", "profiling", "schedules", "training", "weights"]


def main() -> None:
    """Run a command. A PenstockError is printed as one message, with exit code 2."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # characters that the terminal cannot show become question marks
    try:
        with exit_on_interrupt_during_imports():
            try:
                app()
            finally:
                sys.stdout.flush()  # here a failure can still be reported
    except PenstockError as error:
        _refuse(str(error))
    except MemoryError as error:
        _refuse(f"expected a schedule that fits in memory, but got {error}; ask for less")
    except OSError as error:
        from penstock.app.run.lasting_output import discard

        discard(sys.stdout)
        _refuse(f"expected an output that can be written, but got {error.strerror}; check it")


def _refuse(message: str) -> NoReturn:
    with suppress(OSError):  # standard error may be closed
        typer.echo(f"penstock: {message}", err=True)
    sys.exit(2)


def _open_closed_streams() -> None:
    """Open closed standard streams on the null device, so that files opened later do not get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: PTH123, SIM115
