"""Commands that run a config: train, verify, compare."""

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
    from penstock.app.compare.result import Comparison


@app.command()
def train(
    config: ConfigFile,
    steps: Annotated[int | None, typer.Option(help="Steps, in place of the config's.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the measured run to this HTML file.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Use this plan in place of the config's stages, replicas and schedule.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Continue from this checkpoint; auto: from the newest of this run, if any.")
    ] = None,
    inline: Inline = False,
    as_json: AsJson = False,
) -> None:
    """Train a config on local workers, one per replica of every stage, or on the ranks that torchrun has launched.

    Example: `penstock train examples/gpt.toml --steps 50 --report run.html`
    """
    from penstock.app.config.file import read_raw
    from penstock.training.checkpoint.kept_steps import refuse_early

    overrides = {
        "training.steps": steps,
        "training.report": None if report is None else str(report),
        "training.resume": resume,
    }
    changes: dict[str, Any] = {key: value for key, value in overrides.items() if value is not None}
    if plan is not None:
        own = ("stages", "replicas", "cuts", "chunks", "schedule", "microbatches")
        changes |= {f"pipeline.{name}": None for name in own} | {"pipeline.options": {}, "pipeline.plan": str(plan)}
    section = read_raw(config, changes).get("training")
    if isinstance(section, dict):
        refuse_early(section)
    from penstock.app.run.request import Request, start  # imports torch
    from penstock.app.run.train import train as work

    request = Request(str(config), changes, {"json": as_json})
    raise typer.Exit(start("penstock.app.run.train", work, request, inline))


@app.command()
def verify(
    config: ConfigFile,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare.")] = 3,
    as_trained: Annotated[
        bool, typer.Option("--as-trained", help="Use the config's precision. Default: double precision.")
    ] = False,
    inline: Inline = False,
    as_json: AsJson = False,
) -> None:
    """Train as a pipeline and in one plain process, and compare losses, gradients and weights.

    The exit code is 0 if they are equal up to rounding, else 1.

    Example: `penstock verify examples/gpt.toml --steps 3`
    """
    from penstock.app.run.request import Request, start
    from penstock.app.verify.command import refuse_asynchronous
    from penstock.app.verify.command import verify as work

    request = Request(str(config), {}, {"steps": steps, "as_trained": as_trained, "json": as_json})
    refuse_asynchronous(request.task().config.pipeline.schedule)
    raise typer.Exit(start("penstock.app.verify.command", work, request, inline))


@app.command()
def compare(
    config: ConfigFile,
    methods: Annotated[str | None, typer.Option(help="Names separated by commas: plain,1f1b,pipedream,...")] = None,
    steps: Annotated[int | None, typer.Option(help="Mini-batches, in place of the config's.")] = None,
    stages: Annotated[
        int | None, typer.Option("--stages", "-p", help="In place of the config's, whose cuts are then ignored.")
    ] = None,
    t1: Annotated[int | None, typer.Option(help="K of T1. Default: a quarter of the mini-batches.")] = None,
    t3: Annotated[int | None, typer.Option(help="N of T3. Default: a tenth of the mini-batches.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write loss against samples and time to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write table and pictures to this file.")] = None,
    inline: Inline = False,
    as_json: AsJson = False,
) -> None:
    """Train the same model by several methods with the same data and seed, and compare speed, memory and loss.

    Times are measured on local workers if there are cores for all stages, else simulated.
    The exit code is 1 if an exception or the death of a worker ended a method, or if no method could be trained.

    Example: `penstock compare examples/gpt.toml --steps 40 --methods plain,1f1b,pipedream,2bw --html compare.html`
    """
    from penstock.app.compare.command import CompareOptions
    from penstock.app.compare.command import compare as work
    from penstock.app.run.request import Request
    from penstock.app.run.train import require_writable

    overrides = {"training.steps": steps, "pipeline.stages": stages}
    changes: dict[str, Any] = {key: value for key, value in overrides.items() if value is not None}
    if stages is not None:
        changes["pipeline.cuts"] = None
    for file in (svg, html):
        require_writable(None if file is None else str(file), "a picture")
    names = None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    comparison = work(Request(str(config), changes), CompareOptions(names, t1, t3, inline), sys.stderr)
    if any(row.losses for row in comparison.rows):
        write_files(svg=(svg, comparison.svg), html=(html, comparison.html))
    for text in comparison.tracebacks():
        typer.echo(text, err=True)
    if as_json:
        typer.echo(json.dumps(comparison.to_json()))
    else:
        _print_comparison(comparison)
    if comparison.failed:
        raise typer.Exit(1)


def _print_comparison(comparison: Comparison) -> None:
    from rich.console import Console

    from penstock.app.compare.result import WIDTH

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(comparison.title, style="bold", highlight=False)
    console.print(comparison.table())
    for line in comparison.captions():
        console.print(line, highlight=False, soft_wrap=True, markup=False)
