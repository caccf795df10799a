"""Flags of several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Name = Annotated[str, typer.Argument(help="A method; `penstock schedules` lists them.")]
Stages = Annotated[int | None, typer.Option("--stages", "-p", help="Pipeline ranks.")]
Microbatches = Annotated[int | None, typer.Option("--microbatches", "-m", help="Micro-batches per mini-batch.")]
Batches = Annotated[int | None, typer.Option(help="Mini-batches. Default: 1 for synchronous methods.")]
Chunks = Annotated[int | None, typer.Option(help="Stages per rank.")]
Replicas = Annotated[str, typer.Option(help="Replicas of every rank: one number, or one per rank: 3,1.")]
Policy = Annotated[str | None, typer.Option(help="dapple: pa or pb.")]
Cap = Annotated[int | None, typer.Option(help="dapple: most micro-batches in flight, D.")]
Overlap = Annotated[bool, typer.Option("--overlap", help="dualpipe-v: F&B is one atomic action of F + B.")]
Vertical = Annotated[bool, typer.Option("--vertical-sync", help="pipedream: all stages use the first stage's version.")]
NoStash = Annotated[bool, typer.Option("--no-stash", help="pipedream: no weight stashing (shows the harm).")]
MemoryCap = Annotated[str | None, typer.Option("--memory", help="auto: cap on activations, in units of A.")]
Forward = Annotated[str, typer.Option(help="Seconds of a rank's forward: one number, or one per rank: 1,1.5,1.")]
InputGrad = Annotated[str, typer.Option(help="Seconds of a rank's input gradient.")]
WeightGrad = Annotated[str, typer.Option(help="Seconds of a rank's weight gradient.")]
WeightGradMemory = Annotated[float, typer.Option(help="AW: kept until the weight gradient, as a fraction of A.")]
Transfer = Annotated[str, typer.Option(help="Seconds of a transfer: one number, or one per rank (to the next rank).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PictureFile = Annotated[Path | None, typer.Option(help="Write the timeline to this file.")]
ConfigFile = Annotated[Path, typer.Argument(help="A TOML file: model, data, pipeline, optimizer, training.")]
Inline = Annotated[bool, typer.Option("--inline", help="Run all stages in this process, without workers.")]
