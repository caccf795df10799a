"""Commands that train as a config says: train, verify, compare."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.flags import AsJson, ConfigFile, Inline
from penstock.cli.output import write_files

if TYPE_CHECKING:
    from penstock.app.comparison import Comparison


@app.command()
def train(
    config: ConfigFile,
    steps: Annotated[int | None, typer.Option(help="Steps, in place of the config's.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the measured run to this HTML file.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Train by this plan, in place of the config's stages and schedule.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on from this checkpoint; auto: from the newest of this run, if there is one.")
    ] = None,
    inline: Inline = False,
    as_json: AsJson = False,
) -> None:
    """Train as a config says: on local workers, one a stage, or as the ranks that torchrun has launched.

    Example: `penstock train examples/gpt.toml --steps 50 --report run.html`
    """
    from penstock.app.config_text import read_raw
    from penstock.app.kept_steps import refuse_early

    asked = {
        "training.steps": steps,
        "training.report": None if report is None else str(report),
        "training.resume": resume,
    }
    changes: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
    if plan is not None:
        own = ("stages", "cuts", "chunks", "schedule", "microbatches")
        changes |= {f"pipeline.{name}": None for name in own} | {"pipeline.options": {}, "pipeline.plan": str(plan)}
    section = read_raw(config, changes).get("training")
    if isinstance(section, dict):
        refuse_early(section)
    from penstock.app.start import Request, start  # with torch
    from penstock.app.train import train as work

    request = Request(str(config), changes, {"json": as_json})
    raise typer.Exit(start("penstock.app.train", work, request, inline))


@app.command()
def verify(
    config: ConfigFile,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare.")] = 3,
    as_trained: Annotated[
        bool, typer.Option("--as-trained", help="In the config's own precision, where rounding grows; else in double.")
    ] = False,
    inline: Inline = False,
    as_json: AsJson = False,
) -> None:
    """Train as a pipeline and in one plain process, side by side: how far losses, gradients and weights are apart.

    Leaves with 0 where they are the same up to rounding, with 1 where not.

    Example: `penstock verify examples/gpt.toml --steps 3`
    """
    from penstock.app.start import Request, start
    from penstock.app.verify_run import refuse_asynchronous
    from penstock.app.verify_run import verify as work

    request = Request(str(config), {}, {"steps": steps, "as_trained": as_trained, "json": as_json})
    refuse_asynchronous(request.task().config.pipeline.schedule)
    raise typer.Exit(start("penstock.app.verify_run", work, request, inline))


@app.command()
def compare(
    config: ConfigFile,
    methods: Annotated[str | None, typer.Option(help="Names with commas between: plain,1f1b,pipedream,...")] = None,
    steps: Annotated[int | None, typer.Option(help="Mini-batches, in place of the config's.")] = None,
    stages: Annotated[
        int | None, typer.Option("--stages", "-p", help="In place of the config's, whose cuts are then left out.")
    ] = None,
    t1: Annotated[int | None, typer.Option(help="K of T1: a quarter of the mini-batches unless said.")] = None,
    t3: Annotated[int | None, typer.Option(help="N of T3: a tenth of the mini-batches unless said.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write loss against samples and time to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write table and pictures to this file.")] = None,
    inline: Inline = False,
    as_json: AsJson = False,
) -> None:
    """Train the same model with the same data, seed and budget by each method: speed, memory and loss side by side.

    On local workers, where there are cores for all stages, times are measured; else they are simulated.
    Leaves with 1 where an exception or the death of a worker ended a method, or none could be trained.

    Example: `penstock compare examples/gpt.toml --steps 40 --methods plain,1f1b,pipedream,2bw --html compare.html`
    """
    from penstock.app.compare import Wish
    from penstock.app.compare import compare as work
    from penstock.app.start import Request
    from penstock.app.train import require_writable

    asked = {"training.steps": steps, "pipeline.stages": stages}
    changes: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
    if stages is not None:
        changes["pipeline.cuts"] = None
    for file in (svg, html):
        require_writable(None if file is None else str(file), "a picture")
    names = None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    found = work(Request(str(config), changes), Wish(names, t1, t3, inline), sys.stderr)
    if any(row.losses for row in found.rows):
        write_files(svg=(svg, found.svg), html=(html, found.html))
    for text in found.tracebacks():
        typer.echo(text, err=True)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        _tell(found)
    if found.failed:
        raise typer.Exit(1)


def _tell(found: Comparison) -> None:
    from rich.console import Console

    from penstock.app.comparison import WIDTH

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(found.title, style="bold", highlight=False)
    console.print(found.table())
    for line in found.said():
        console.print(line, highlight=False, soft_wrap=True, markup=False)
