"""Flags that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
ConfigFile = Annotated[Path, typer.Argument(help="A TOML file: model, data, pipeline, optimizer, training.")]
Inline = Annotated[bool, typer.Option("--inline", help="All stages in this process, no workers.")]
