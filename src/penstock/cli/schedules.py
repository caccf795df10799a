"""Commands for schedules: list, print, check, simulate, show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.flags import (
    AsJson,
    Batches,
    Cap,
    Chunks,
    Forward,
    InputGrad,
    MemoryCap,
    Microbatches,
    Name,
    NoStash,
    Overlap,
    PictureFile,
    Policy,
    Replicas,
    Stages,
    Transfer,
    Vertical,
    WeightGrad,
    WeightGradMemory,
)
from penstock.cli.output import draw, terminal
from penstock.cli.parsing import built_schedule, method_options, numbers, read_schedule, read_timeline, stage_costs
from penstock.errors import InputError

if TYPE_CHECKING:
    from penstock.core.schedule import Schedule


@app.command()
def schedules(as_json: AsJson = False) -> None:
    """List the methods.

    Example: `penstock schedules --json`
    """
    from penstock.schedules.registry import METHODS

    if as_json:
        typer.echo(json.dumps([method.to_json() for method in METHODS.values()], indent=2))
        return
    from rich.table import Table

    table = Table("method", "kind", "chunks", "needs", "what it does", box=None, pad_edge=False)
    for method in METHODS.values():
        kind = "asynchronous" if method.asynchronous else "synchronous"
        table.add_row(method.name, kind, method.chunks_in_words, method.rule, method.summary)
    terminal().print(table)


@app.command("schedule")
def schedule_command(
    name: Name,
    stages: Stages = None,
    microbatches: Microbatches = None,
    batches: Batches = None,
    chunks: Chunks = None,
    replicas: Replicas = "1",
    policy: Policy = None,
    cap: Cap = None,
    overlap: Overlap = False,
    vertical_sync: Vertical = False,
    no_stash: NoStash = False,
    forward: Forward = "1",
    input_grad: InputGrad = "1",
    weight_grad: WeightGrad = "1",
    weight_grad_memory: WeightGradMemory = 0.5,
    transfer: Transfer = "0",
    memory: MemoryCap = None,
    lowered: Annotated[bool, typer.Option("--lowered", help="With transfers, reductions and updates.")] = False,
    format: Annotated[str, typer.Option("--format", help="grid, csv, json, or torch (PyTorch's CSV).")] = "grid",
) -> None:
    """Print a schedule.

    Example: `penstock schedule zb-h1 --stages 4 --microbatches 8 --format csv`
    """
    from penstock.core.lower import lower
    from penstock.core.text import to_csv
    from penstock.core.torch_text import to_torch_csv

    costs = stage_costs(forward, input_grad, weight_grad, transfer, weight_grad_memory)
    if name != "auto" and (forward, input_grad, weight_grad, transfer, weight_grad_memory) != ("1", "1", "1", "0", 0.5):
        raise InputError("costs for auto alone", f"costs for {name}, whose order they do not change", "leave them out")
    options = method_options(name, policy, cap, overlap, vertical_sync, no_stash, memory, costs)
    built = built_schedule(name, stages, microbatches, batches, chunks, replicas, options)
    if lowered:
        built = lower(built)
    if name == "auto":
        from penstock.reports.describe import placed

        typer.echo(f"auto: {placed(built.shape)}", err=True)
    if format == "grid":
        from penstock.reports.grid import grid

        terminal().print(grid(built, width=terminal().width), soft_wrap=True)
    elif format in ("csv", "torch", "json"):
        typer.echo({"csv": to_csv, "torch": to_torch_csv, "json": _as_json}[format](built), nl=False)
    else:
        raise InputError("format to be grid, csv, json or torch", repr(format), "choose one of them")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="A schedule as CSV, in penstock's or PyTorch's format.")],
    transfers: Annotated[str, typer.Option(help="buffered, in-order or blocking.")] = "buffered",
    memory: Annotated[str | None, typer.Option(help="Cap on every rank's activations, in units of A.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a schedule against every law and show each fault.

    Example: `penstock check mine.csv --transfers in-order`
    """
    from penstock.core.check import check as run_check

    built = read_schedule(file)
    report = run_check(built, transfers=transfers, memory=None if memory is None else numbers("memory", memory))
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    elif report.ok:
        shape = built.shape
        size = f"{len(built)} actions, {shape.ranks} ranks, {shape.stages} stages, {shape.total} micro-batches"
        typer.echo(f"{file}: sound ({size}, law {shape.law.value!r}, transfers {transfers})")
    else:
        typer.echo(f"{file}: {report}", err=True)
    if not report.ok:
        raise typer.Exit(2)


@app.command()
def simulate(
    schedule: Annotated[str, typer.Option("--schedule", help="A method, or a CSV file.")],
    stages: Stages = None,
    microbatches: Microbatches = None,
    batches: Batches = None,
    chunks: Chunks = None,
    replicas: Replicas = "1",
    forward: Forward = "1",
    input_grad: InputGrad = "1",
    weight_grad: WeightGrad = "1",
    weight_grad_memory: WeightGradMemory = 0.5,
    transfer: Transfer = "0",
    update: Annotated[str, typer.Option(help="Seconds of a rank's optimizer step.")] = "0",
    reduce: Annotated[str, typer.Option(help="Seconds of a rank's gradient reduction over its replicas.")] = "0",
    recompute: Annotated[bool, typer.Option("--recompute", help="Backwards recompute their forward.")] = False,
    policy: Policy = None,
    cap: Cap = None,
    overlap: Overlap = False,
    vertical_sync: Vertical = False,
    no_stash: NoStash = False,
    memory: MemoryCap = None,
    as_json: AsJson = False,
    svg: PictureFile = None,
    html: PictureFile = None,
    trace: PictureFile = None,
) -> None:
    """Predict time, bubble and memory of a schedule, and draw it.

    Example: `penstock simulate --schedule zb-v --stages 4 --microbatches 8 --html zb-v.html`
    """
    from penstock.core.cost import flat_costs
    from penstock.core.shape import Law
    from penstock.simulator.breakdown import breakdown
    from penstock.simulator.simulate import simulate_costs

    costs = stage_costs(forward, input_grad, weight_grad, transfer, weight_grad_memory)
    if schedule.endswith(".csv"):
        shape_flags: dict[str, Any] = {"--stages": stages, "--microbatches": microbatches, "--batches": batches}
        shape_flags |= {
            "--chunks": chunks,
            "--policy": policy,
            "--cap": cap,
            "--overlap": overlap,
            "--vertical-sync": vertical_sync,
        }
        shape_flags |= {"--no-stash": no_stash, "--memory": memory, "--replicas": replicas != "1"}
        used = [flag for flag, value in shape_flags.items() if value]
        if used:
            raise InputError("a file, which states its shape", ", ".join(used), "omit these, or name a method")
        built = read_schedule(Path(schedule))
    else:
        options = method_options(schedule, policy, cap, overlap, vertical_sync, no_stash, memory, costs)
        built = built_schedule(schedule, stages, microbatches, batches, chunks, replicas, options)
    priced = flat_costs(
        built.shape, **costs, update=numbers("update", update), reduce=numbers("reduce", reduce), recompute=recompute
    )
    line = simulate_costs(built, priced)
    parts = breakdown(built, priced)
    draw(line, svg=svg, html=html, trace=trace)
    if as_json:
        typer.echo(json.dumps(line.figures() | {"breakdown": parts.to_json()}))
        return
    from penstock.reports.gantt import gantt
    from penstock.reports.tables import summary

    console = terminal()
    console.print(gantt(line, console.width), soft_wrap=True)
    console.print(summary(line))
    shares = " · ".join(f"{part} {share:.1%}" for part, share in parts.shares().items() if share >= 0.0005)
    scope = "" if built.shape.law is Law.SYNC else ", fill and drain included"
    console.print(f"where the time goes{scope}: {shares}", highlight=False)


@app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="Timelines as JSON, as `Timeline.to_json` gives them.")],
    as_json: AsJson = False,
    svg: PictureFile = None,
    html: PictureFile = None,
    trace: PictureFile = None,
) -> None:
    """Draw timelines from files, predicted or measured; several files share one time axis.

    Example: `penstock show predicted.json measured.json --svg both.svg`
    """
    lines = [(file.stem, read_timeline(file)) for file in files]
    draw(lines[0][1] if len(lines) == 1 else lines, svg=svg, html=html, trace=trace)
    if as_json:
        figures = [{"file": str(file), **line.figures()} for file, (_, line) in zip(files, lines, strict=True)]
        typer.echo(json.dumps(figures[0] if len(figures) == 1 else figures))
        return
    from penstock.reports.gantt import gantt
    from penstock.reports.tables import summary

    console = terminal()
    for _, line in lines:
        console.print(gantt(line, console.width), soft_wrap=True)
        console.print(summary(line))


def _as_json(built: Schedule) -> str:
    return json.dumps(built.to_json()) + "\n"
