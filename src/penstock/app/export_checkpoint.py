"""Export the weights of a checkpoint: it knows all that a Pipeline's export would ask its model.

One process does this, tensor by tensor: it holds no more than the largest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from penstock.app.checkpoint_files import Records, read_facts, read_tensors
from penstock.app.crew import Crew
from penstock.app.export import beside_weights, write_beside
from penstock.app.kept_steps import FACTS
from penstock.app.safetensors_file import FILE, Form, Layout
from penstock.app.unfinished import write_new
from penstock.engine.alone import Alone
from penstock.errors import FormatError

WEIGHTS = "model."  # begins the names of a checkpoint's weights


def export_checkpoint(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint's weights to a path where nothing is yet: a safetensors file, or a transformers directory."""
    directory, final = Path(source).absolute(), Path(path).absolute()
    facts, records = read_facts(directory)
    if "tied" not in facts:
        came = "one of an older version, which does not say so"
        advice = "load it into its Pipeline, and use pipe.export()"
        raise FormatError(str(directory / FACTS), "a checkpoint that says which weights are tied", came, advice)
    tied: dict[str, str] = facts["tied"]
    names = {name.removeprefix(WEIGHTS): name for name in records if name.startswith(WEIGHTS)}
    names |= {name: WEIGHTS + first for name, first in tied.items()}
    beside = beside_weights(final, facts["pretrained"])
    layout = Layout({name: Form(records[told].dtype, records[told].shape) for name, told in names.items()})
    write_new(
        Crew(Alone(), (0,)),
        final,
        lambda new: layout.begin(new / FILE),
        lambda new: layout.write(new / FILE, _tensors(directory, records, names)),
        lambda new, _: write_beside(new, beside),
        None if beside else FILE,
    )


def _tensors(directory: Path, records: Records, names: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """One after the other, each read once."""
    every: dict[str, list[str]] = {}
    for name, told in names.items():
        every.setdefault(told, []).append(name)
    for told, same in every.items():
        tensor = read_tensors(directory, {told: records[told]})[told]
        yield from ((name, tensor) for name in same)
