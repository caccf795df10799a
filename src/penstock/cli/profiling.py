"""The command that measures profiles."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.app import app
from penstock.cli.flags import AsJson, ConfigFile
from penstock.cli.output import write_files

WIDTH = 120  # columns of tables that are not printed to a terminal


@app.command("profile")
def profile_command(
    config: ConfigFile,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the profile to this JSON file.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Undisturbed samples to take.")] = 10,
    threads: Annotated[int, typer.Option(min=1, help="Threads per process.")] = 1,
    busy: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes that measure at once. Default: as many as train, if they share these cores."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure every layer of a config's model: seconds forward and backward, and bytes. Nothing is trained.

    Example: `penstock profile examples/gpt.toml -o profile.json`
    """
    from rich.console import Console

    from penstock.app.profile.command import run
    from penstock.app.profile.table import notes, table
    from penstock.app.run.request import Request
    from penstock.app.run.train import require_writable

    require_writable(None if output is None else str(output), "a profile")
    outcome = run(Request(str(config), {}, {"repetitions": repetitions, "threads": threads}), busy, sys.stderr)
    if isinstance(outcome, int):
        raise typer.Exit(outcome)
    text = json.dumps(outcome.profile.to_json(), indent=2)
    write_files(profile=(output, lambda: text))
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else WIDTH)
    if as_json:
        typer.echo(text)
    else:
        console.print(table(outcome.profile))
    for line in notes(outcome):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
