"""Commands for clusters: measure this one, list and show presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.app import app
from penstock.cli.flags import AsJson

clusters = typer.Typer(help="Clusters: measure this one, list and show presets.", no_args_is_help=True)
app.add_typer(clusters, name="cluster")


@clusters.command()
def measure(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the TOML to this file.")] = None,
    devices: Annotated[
        int | None, typer.Option(help="CUDA devices or CPU workers. Default: all, or one per core.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure memory, transfers and all-reduces of this machine's devices, and write a cluster file.

    On several hosts, run it under torchrun; links between hosts are then measured too.

    Example: `penstock cluster measure -o cluster.toml`
    """
    from penstock.app.cluster.command import measure_command

    raise typer.Exit(measure_command(output, devices, as_json))


@clusters.command("list")
def list_presets(as_json: AsJson = False) -> None:
    """List the presets that `--cluster` knows by name.

    Example: `penstock cluster list`
    """
    from penstock.core.cluster_presets import PRESETS

    typer.echo(json.dumps(list(PRESETS)) if as_json else "\n".join(PRESETS))


@clusters.command()
def show(
    name: Annotated[str, typer.Argument(help="A TOML file, or a preset such as dgx-a100.")], as_json: AsJson = False
) -> None:
    """Print a cluster with all its figures, including those of its preset.

    Example: `penstock cluster show dgx-h100`
    """
    from penstock.core.cluster_file import read_cluster
    from penstock.core.cluster_toml import to_toml

    cluster = read_cluster(name)
    typer.echo(json.dumps(cluster.to_json()) if as_json else to_toml(cluster), nl=as_json)
