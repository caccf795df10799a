"""Export a model's weights: to one safetensors file, or to a directory that transformers' `from_pretrained` takes.

A tied weight is written once for each of its names. A safetensors file cannot say that two names share their bytes, and
`load_state_dict` with `strict=True` wants all names; whoever loads it into a model that ties them has one weight again.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.app.model_names import state_of
from penstock.app.pretrained import FILES, pretrained_files
from penstock.app.safetensors_file import FILE, Form, Layout
from penstock.app.state import homes
from penstock.app.together import patient, same_path, together
from penstock.app.unfinished import require_nothing_at, sync, write_new
from penstock.errors import InputError

if TYPE_CHECKING:
    from penstock.app.pipeline import Pipeline

SUFFIX = ".safetensors"


def export(pipe: Pipeline, path: str | os.PathLike[str]) -> None:
    """Write the weights to a path where nothing is yet. Every rank has to call, between two steps."""
    crew, rank = pipe.crew, pipe.crew.world.rank
    final = same_path(crew, path)

    def described() -> dict[str, Any]:
        require_nothing_at(final)
        beside = beside_weights(final, pretrained_files(pipe.model))
        home = homes(crew, pipe.split)
        mine.update({name: tensor for name, tensor in state_of(pipe.model).items() if home[name] == rank})
        return {"forms": {name: asdict(Form.of(name, tensor)) for name, tensor in mine.items()}, "beside": beside}

    mine: dict[str, Any] = {}
    with patient(crew):
        told = together(crew, f"to write {final}", described)
        forms = {name: Form(**form) for part in told for name, form in part["forms"].items()}
    layout = Layout(forms)
    write_new(
        crew,
        final,
        lambda directory: layout.begin(directory / FILE),
        lambda directory: layout.write(directory / FILE, mine.items()),
        lambda directory, _: write_beside(directory, told[0]["beside"]),
        None if told[0]["beside"] else FILE,
    )


def beside_weights(final: Path, pretrained: dict[str, str] | None) -> dict[str, str]:
    """The files that go with the weights into a directory; none where a file of weights is asked for."""
    if final.suffix == SUFFIX:
        return {}
    if pretrained is None:
        came = f"{final.name} for a model that is not transformers', which alone have directories of their own"
        raise InputError(f"a path that ends in {SUFFIX}", came, f"give one such as {final.name}{SUFFIX}")
    return pretrained


def write_beside(directory: Path, files: dict[str, str]) -> None:
    for name in FILES:
        if name in files:
            (directory / name).write_text(files[name], encoding="utf-8")
            sync(directory / name)
    sync(directory)
