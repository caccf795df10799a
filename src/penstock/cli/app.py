"""The application that commands are added to."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="Train a PyTorch model as a pipeline: see, check and price its schedule.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from penstock import __version__

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train a PyTorch model as a pipeline: see, check and price its schedule."""
