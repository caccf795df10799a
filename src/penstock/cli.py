"""The command line: one thin subcommand per arrow of the design; files or flags in, a table or JSON out.

Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.errors import FormatError, InputError, PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.app.comparison import Comparison
    from penstock.core.schedule import Schedule
    from penstock.core.timeline import Timeline
    from penstock.reports.panels import Timelines

app = typer.Typer(
    help="Train a PyTorch model as a pipeline: see, check and price its schedule.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Name = Annotated[str, typer.Argument(help="A method; `penstock schedules` lists them.")]
Stages = Annotated[int | None, typer.Option("--stages", "-p", help="Pipeline ranks.")]
Microbatches = Annotated[int | None, typer.Option("--microbatches", "-m", help="Micro-batches a mini-batch.")]
Batches = Annotated[int | None, typer.Option(help="Mini-batches (synchronous methods: 1 unless said otherwise).")]
Chunks = Annotated[int | None, typer.Option(help="Pieces of the model a rank holds.")]
Replicas = Annotated[str, typer.Option(help="Replicas of every rank: one number, or one a rank: 3,1.")]
Policy = Annotated[str | None, typer.Option(help="dapple: pa or pb.")]
Cap = Annotated[int | None, typer.Option(help="dapple: most live micro-batches, D.")]
Overlap = Annotated[bool, typer.Option("--overlap", help="dualpipe-v: F&B is one atomic action of F + B.")]
Vertical = Annotated[bool, typer.Option("--vertical-sync", help="pipedream: all stages use the first one's version.")]
NoStash = Annotated[bool, typer.Option("--no-stash", help="pipedream: no weight stashing (shows the harm).")]
MemoryCap = Annotated[str | None, typer.Option("--memory", help="auto: cap on activations, in units of A.")]
Forward = Annotated[str, typer.Option(help="Seconds of a rank's forward: one number, or one a stage: 1,1.5,1.")]
InputGrad = Annotated[str, typer.Option(help="Seconds of a rank's input gradient.")]
WeightGrad = Annotated[str, typer.Option(help="Seconds of a rank's weight gradient.")]
WeightGradMemory = Annotated[float, typer.Option(help="AW: what stays until the weight gradient, as a fraction of A.")]
Transfer = Annotated[str, typer.Option(help="Seconds of a transfer: one number, or one a rank (to the next one).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PictureFile = Annotated[Path | None, typer.Option(help="Write the timeline to this file.")]


def _version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train a PyTorch model as a pipeline: see, check and price its schedule."""


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
    _console().print(table)


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

    costs = _costs(forward, input_grad, weight_grad, transfer, weight_grad_memory)
    if name != "auto" and (forward, input_grad, weight_grad, transfer, weight_grad_memory) != ("1", "1", "1", "0", 0.5):
        raise InputError("costs for auto alone", f"costs for {name}, whose order they do not change", "leave them out")
    options = _options(name, policy, cap, overlap, vertical_sync, no_stash, memory, costs)
    built = _build(name, stages, microbatches, batches, chunks, replicas, options)
    if lowered:
        built = lower(built)
    if format == "grid":
        from penstock.reports.grid import grid

        _console().print(grid(built, width=_console().width), soft_wrap=True)
    elif format in ("csv", "torch", "json"):
        typer.echo({"csv": to_csv, "torch": to_torch_csv, "json": _as_json}[format](built), nl=False)
    else:
        raise InputError("format to be grid, csv, json or torch", repr(format), "choose one of them")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="A schedule as CSV: ours, or PyTorch's.")],
    transfers: Annotated[str, typer.Option(help="buffered, in-order or blocking.")] = "buffered",
    memory: Annotated[str | None, typer.Option(help="Cap on every rank's activations, in units of A.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a schedule against every law and point at each fault.

    Example: `penstock check mine.csv --transfers in-order`
    """
    from penstock.core.check import check as run_check

    built = _read(file)
    report = run_check(built, transfers=transfers, memory=None if memory is None else _numbers("memory", memory))
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
    recompute: Annotated[bool, typer.Option("--recompute", help="Backwards run their forward again.")] = False,
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
    from penstock.simulator.breakdown import breakdown
    from penstock.simulator.simulate import simulate_costs

    costs = _costs(forward, input_grad, weight_grad, transfer, weight_grad_memory)
    if schedule.endswith(".csv"):
        asked: dict[str, Any] = {"--stages": stages, "--microbatches": microbatches, "--batches": batches}
        asked |= {
            "--chunks": chunks,
            "--policy": policy,
            "--cap": cap,
            "--overlap": overlap,
            "--vertical-sync": vertical_sync,
        }
        asked |= {"--no-stash": no_stash, "--memory": memory, "--replicas": replicas != "1"}
        given = [flag for flag, value in asked.items() if value]
        if given:
            raise InputError("a file to say its own shape", ", ".join(given), "leave these out, or name a method")
        built = _read(Path(schedule))
    else:
        options = _options(schedule, policy, cap, overlap, vertical_sync, no_stash, memory, costs)
        built = _build(schedule, stages, microbatches, batches, chunks, replicas, options)
    priced = flat_costs(
        built.shape, **costs, update=_numbers("update", update), reduce=_numbers("reduce", reduce), recompute=recompute
    )
    line = simulate_costs(built, priced)
    parts = breakdown(built, priced)
    _draw(line, svg=svg, html=html, trace=trace)
    if as_json:
        typer.echo(json.dumps(line.figures() | {"breakdown": parts.to_json()}))
        return
    from penstock.reports.gantt import gantt
    from penstock.reports.summary import summary

    console = _console()
    console.print(gantt(line, console.width), soft_wrap=True)
    console.print(summary(line))
    shares = " · ".join(f"{part} {share:.1%}" for part, share in parts.shares().items() if share)
    console.print(f"where the time goes: {shares}", highlight=False)


@app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="Timelines as JSON, as `Timeline.to_json` gives them.")],
    as_json: AsJson = False,
    svg: PictureFile = None,
    html: PictureFile = None,
    trace: PictureFile = None,
) -> None:
    """Draw timelines from files, predicted or measured; several over each other on one time axis.

    Example: `penstock show predicted.json measured.json --svg both.svg`
    """
    lines = [(file.stem, _read_timeline(file)) for file in files]
    _draw(lines[0][1] if len(lines) == 1 else lines, svg=svg, html=html, trace=trace)
    if as_json:
        found = [{"file": str(file), **line.figures()} for file, (_, line) in zip(files, lines, strict=True)]
        typer.echo(json.dumps(found[0] if len(found) == 1 else found))
        return
    from penstock.reports.gantt import gantt
    from penstock.reports.summary import summary

    console = _console()
    for _, line in lines:
        console.print(gantt(line, console.width), soft_wrap=True)
        console.print(summary(line))


ConfigFile = Annotated[Path, typer.Argument(help="A TOML file: model, data, pipeline, optimizer, training.")]
Inline = Annotated[bool, typer.Option("--inline", help="All stages in this process, no workers.")]


@app.command()
def train(
    config: ConfigFile,
    steps: Annotated[int | None, typer.Option(help="Steps, in place of the config's.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the measured run to this HTML file.")] = None,
    inline: Inline = False,
    as_json: AsJson = False,
) -> None:
    """Train as a config says: on local workers, one a stage, or as the ranks that torchrun has launched.

    Example: `penstock train examples/gpt.toml --steps 50 --report run.html`
    """
    from penstock.app.start import Request, start
    from penstock.app.train import train as work

    asked = {"training.steps": steps, "training.report": None if report is None else str(report)}
    changes = {key: value for key, value in asked.items() if value is not None}
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
        _write(svg=(svg, found.svg), html=(html, found.html))
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        _tell(found)
    if all(row.note is not None for row in found.rows):
        raise typer.Exit(1)


@app.command("plan")
def plan_command(
    profile: Annotated[Path, typer.Option(help="A profile: JSON, or the literature's text.")],
    cluster: Annotated[str, typer.Option(help="A TOML file, or a preset such as dgx-a100.")],
    method: Annotated[str, typer.Option(help="balance, gpipe, pipedream, dapple, 2bw or all.")] = "dapple",
    batch: Annotated[int | None, typer.Option(help="Rows of a batch.")] = None,
    microbatch: Annotated[int | None, typer.Option(help="Rows of a micro-batch.")] = None,
    samples: Annotated[int | None, typer.Option(help="Rows that a text profile measured.")] = None,
    hosts: Annotated[int | None, typer.Option(help="Hosts, in place of the cluster's own.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a pipeline for a profile and a cluster, and predict its step."""
    from penstock.app.plan_run import plan_command as run

    given = {"batch": batch, "microbatch": microbatch, "samples": samples, "hosts": hosts}
    typer.echo(run(profile, cluster, method, **given, json_wanted=as_json))


def _tell(found: Comparison) -> None:
    from rich.console import Console

    from penstock.app.comparison import WIDTH

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(found.title, style="bold", highlight=False)
    console.print(found.table())
    for line in found.said():
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _write(**files: tuple[Path | None, Callable[[], str]]) -> None:
    for file, made in files.values():
        if file is not None:
            file.write_text(made(), encoding="utf-8")
            typer.echo(f"wrote {file}", err=True)


def _as_json(built: Schedule) -> str:
    return json.dumps(built.to_json()) + "\n"


def _build(
    name: str,
    stages: int | None,
    microbatches: int | None,
    batches: int | None,
    chunks: int | None,
    replicas: str,
    options: dict[str, Any],
) -> Schedule:
    from penstock.schedules.registry import schedule

    if stages is None:
        raise InputError(f"a number of stages for {name}", "none", "give --stages")
    try:
        counts = [int(count) for count in replicas.split(",")]
    except ValueError:
        raise InputError("--replicas to be whole numbers", repr(replicas), "write it like 2 or 3,1") from None
    return schedule(
        name,
        stages=stages,
        microbatches=microbatches,
        batches=batches,
        chunks=chunks,
        replicas=counts[0] if len(counts) == 1 else counts,
        **options,
    )


def _options(
    name: str,
    policy: str | None,
    cap: int | None,
    overlap: bool,
    vertical_sync: bool,
    no_stash: bool,
    memory: str | None,
    costs: dict[str, Any],
) -> dict[str, Any]:
    """The method's own options: those that were given; a method that lacks one refuses it."""
    most = None if memory is None else _numbers("memory", memory)
    given: dict[str, Any] = {"policy": policy, "cap": cap, "memory": most}
    given |= {"overlap": overlap or None, "vertical_sync": vertical_sync or None, "stash": False if no_stash else None}
    options = {option: value for option, value in given.items() if value is not None}
    return options | costs if name == "auto" else options


def _costs(forward: str, input_grad: str, weight_grad: str, transfer: str, weight_grad_memory: float) -> dict[str, Any]:
    return {
        "forward": _numbers("forward", forward),
        "input_grad": _numbers("input-grad", input_grad),
        "weight_grad": _numbers("weight-grad", weight_grad),
        "transfer": _numbers("transfer", transfer),
        "weight_grad_memory": weight_grad_memory,
    }


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"--{flag} to be a number, or several with commas", repr(text), "write it like 1,1.5,1"
        ) from None


def _read(file: Path) -> Schedule:
    from penstock.core.text import from_csv
    from penstock.core.torch_text import from_torch_csv, is_torch_csv

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise FormatError(str(file), "a readable CSV file", reason, "check the path and the file") from None
    return (from_torch_csv if is_torch_csv(text) else from_csv)(text, str(file))


def _read_timeline(file: Path) -> Timeline:
    from penstock.core.timeline import Timeline

    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise FormatError(str(file), "a timeline as JSON", reason, "check the path and the file") from None
    return Timeline.from_json(data)


def _draw(line: Timelines, **files: Path | None) -> None:
    from penstock.reports.html import html
    from penstock.reports.svg import svg
    from penstock.reports.trace import trace

    for kind, writer in (("svg", svg), ("html", html), ("trace", trace)):
        file = files[kind]
        if file is not None:
            try:
                file.write_text(writer(line), encoding="utf-8")
            except OSError as error:
                raise InputError(
                    f"a file that can be written for --{kind}", f"{file}: {error.strerror}", "change the path"
                ) from None
            typer.echo(f"wrote {file}", err=True)


def _console() -> Any:
    from rich.console import Console

    return Console()


def main() -> None:
    """Run a command; an error of penstock's own is one message and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a sign gets a question mark
    try:
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


if __name__ == "__main__":
    main()
