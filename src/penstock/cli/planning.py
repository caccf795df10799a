"""Commands that plan: from a profile and a cluster to stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.flags import AsJson


@app.command("plan")
def plan_command(
    profile: Annotated[Path, typer.Option(help="A profile: JSON, or the literature's text.")],
    cluster: Annotated[str, typer.Option(help="A TOML file, or a preset such as dgx-a100.")],
    method: Annotated[
        str, typer.Option(help="search, balance, gpipe, pipedream, dapple, 2bw, or all to compare them.")
    ] = "search",
    batch: Annotated[int | None, typer.Option(help="Rows of a batch.")] = None,
    microbatch: Annotated[int | None, typer.Option(help="Rows of a micro-batch; search then takes no other.")] = None,
    samples: Annotated[int | None, typer.Option(help="Rows that a text profile measured.")] = None,
    hosts: Annotated[int | None, typer.Option(help="Hosts, in place of the cluster's own.")] = None,
    stages: Annotated[int | None, typer.Option("--stages", "-p", help="balance, gpipe: stages.")] = None,
    schedules: Annotated[
        str | None, typer.Option(help="search: any, synchronous, asynchronous, or names with commas between.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="search: stop after that long with the best so far.")] = None,
    seed: Annotated[int | None, typer.Option(help="search: of its random choices.")] = None,
    replicas: Annotated[
        int | None, typer.Option(help="search: devices that may share a stage; training knows 1 so far.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a pipeline for a profile and a cluster, predict its step, and say why.

    Example: `penstock plan --profile profile.json --cluster dgx-a100 --batch 512 --schedules synchronous`
    """
    from penstock.app.plan_run import plan_command as run

    sizes: dict[str, Any] = {"batch": batch, "microbatch": microbatch, "samples": samples, "hosts": hosts}
    own: dict[str, Any] = {"stages": stages, "schedules": schedules, "seconds": seconds, "seed": seed}
    own["replicas"] = replicas
    typer.echo(run(profile, cluster, method, **sizes, **own, json_wanted=as_json))
