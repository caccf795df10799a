"""The command that estimates the profile of a model for hardware that is not available."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.app import app
from penstock.cli.flags import AsJson
from penstock.cli.output import write_files
from penstock.cli.profiling import WIDTH
from penstock.errors import InputError


@app.command()
def estimate(
    config: Annotated[Path | None, typer.Argument(help="A TOML file: model, data, pipeline, optimizer, ...")] = None,
    device: Annotated[str | None, typer.Option(help="h100, h200, a100, v100, l40s, rtx-4090, cpu, ...")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the profile to this JSON file.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32, in place of the config's.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="A TOML file that corrects the device.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Measure this machine's device, and write its calibration.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the profile of a config's model for a device, without the device and without the model's weights.

    Example: `penstock estimate examples/llama_7b.toml --device h100 -o profile.json`
    """
    if config is None and calibrate is None:
        raise InputError("a config, or --calibrate", "neither", "name a TOML file, such as examples/gpt.toml")
    if calibrate is not None:
        _calibrate(calibrate)
    if config is not None:
        _estimate(config, device, output, precision, calibration or calibrate, as_json)


def _calibrate(file: Path) -> None:
    from penstock.app.run.train import require_writable
    from penstock.profiler.calibrate import calibrate
    from penstock.profiler.calibration import calibration_text

    require_writable(str(file), "a calibration")
    machine = calibrate(lambda what: typer.echo(f"measuring {what}", err=True))
    write_files(calibration=(file, lambda: calibration_text(machine)))


def _estimate(
    config: Path,
    device: str | None,
    output: Path | None,
    precision: str | None,
    calibration: Path | None,
    print_json: bool,
) -> None:
    from rich.console import Console

    from penstock.app.profile.estimate import as_json, estimate_config, notes
    from penstock.app.profile.table import table
    from penstock.app.run.train import require_writable

    require_writable(None if output is None else str(output), "a profile")
    estimated = estimate_config(config, device, precision, calibration)
    write_files(profile=(output, lambda: json.dumps(estimated.profile.to_json(), indent=2)))
    if print_json:
        typer.echo(json.dumps(as_json(estimated)))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table(estimated.profile))
    for line in notes(estimated):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
