"""The command that plans a pipeline from a profile and a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.flags import AsJson


@app.command("plan")
def plan_command(
    profile: Annotated[Path, typer.Option(help="A profile: JSON, or the text format of published profiles.")],
    cluster: Annotated[str, typer.Option(help="A TOML file, or a preset such as dgx-a100.")],
    method: Annotated[
        str, typer.Option(help="search, balance, gpipe, pipedream, dapple, 2bw, or all to compare them.")
    ] = "search",
    batch: Annotated[int | None, typer.Option(help="Rows of a batch.")] = None,
    microbatch: Annotated[int | None, typer.Option(help="Rows of a micro-batch; search then tries no other.")] = None,
    samples: Annotated[int | None, typer.Option(help="Rows of the batch that a text profile measured.")] = None,
    hosts: Annotated[int | None, typer.Option(help="Hosts, in place of the cluster's.")] = None,
    stages: Annotated[int | None, typer.Option("--stages", "-p", help="balance, gpipe: stages.")] = None,
    schedules: Annotated[
        str | None,
        typer.Option(help="search: any (the default), synchronous, asynchronous, or names with commas."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="search: stop after this time with the best plan so far.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="search: seed of its random choices.")] = None,
    replicas: Annotated[
        int | None, typer.Option(help="search: most replicas of a stage; training supports 1 so far.")
    ] = None,
    allow_async: Annotated[
        bool,
        typer.Option("--allow-async", help="search, all: also asynchronous plans, which change the training result."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a pipeline for a profile and a cluster, predict its step time, and explain the choice.

    Asynchronous plans have no bubble, but train with weights that are some updates old, so the loss may fall more
    slowly or not at all. They are planned only on request: by --allow-async, or by the name of a schedule or method.

    Example: `penstock plan --profile profile.json --cluster dgx-a100 --batch 512`
    """
    from penstock.app.plan.command import plan_command as run

    sizes: dict[str, Any] = {"batch": batch, "microbatch": microbatch, "samples": samples, "hosts": hosts}
    own: dict[str, Any] = {"stages": stages, "schedules": schedules, "seconds": seconds, "seed": seed}
    own |= {"replicas": replicas, "allow_async": allow_async or None}
    typer.echo(run(profile, cluster, method, **sizes, **own, json_wanted=as_json))
