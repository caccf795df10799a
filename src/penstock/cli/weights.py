"""Commands that export and import the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.app import app
from penstock.cli.flags import ConfigFile, Inline
from penstock.cli.parsing import require_there


@app.command("export")
def export_weights(
    checkpoint: Annotated[Path, typer.Argument(help="A directory saved by a training run.", show_default=False)],
    path: Annotated[
        Path,
        typer.Argument(
            help="The output: a file that ends in .safetensors, or a directory for a transformers model.",
            show_default=False,
        ),
    ],
) -> None:
    """Write a checkpoint's weights for other tools, to a safetensors file or a directory for `from_pretrained`.

    Example: `penstock export checkpoints/step-120 gpt.safetensors`
    """
    from penstock.training.weight_files.export import export_checkpoint

    export_checkpoint(checkpoint, path)
    typer.echo(f"wrote {path}", err=True)


@app.command("import")
def import_weights(
    config: ConfigFile,
    weights: Annotated[
        Path, typer.Argument(help="A safetensors file, or a directory of a transformers model.", show_default=False)
    ],
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint to write.", show_default=False)],
    inline: Inline = False,
) -> None:
    """Write a checkpoint of a config's model with weights from other tools, as a start for training.

    Example: `penstock import examples/gpt.toml gpt.safetensors checkpoints/imported`
    """
    require_there(weights, "a safetensors file, or a transformers directory")
    from penstock.app.run.import_weights import import_run  # with torch
    from penstock.app.run.request import Request, start

    request = Request(str(config), {}, {"weights": str(weights), "checkpoint": str(checkpoint)})
    raise typer.Exit(start("penstock.app.run.import_weights", import_run, request, inline))
