"""Export a model's weights: to one safetensors file, or to a directory that transformers' `from_pretrained` takes.

They come from a pipeline, or from a checkpoint without any pipeline. A tied weight is written once for each of its
names. A safetensors file cannot say that two names share their bytes, and `load_state_dict` with `strict=True` wants
all names; whoever loads it into a model that ties them has one weight again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from penstock.comm.world.world import Alone
from penstock.errors import FormatError, InputError
from penstock.training.checkpoint.atomic import patient, require_nothing_at, same_path, sync, together, write_new
from penstock.training.checkpoint.files import Records, read_facts, read_tensors
from penstock.training.checkpoint.kept_steps import FACTS
from penstock.training.model_state import homes, state_of
from penstock.training.pipeline_parts import PipelineParts
from penstock.training.processes import Ranks
from penstock.training.weight_files.safetensors import FILE, FILES, FileLayout, Form, pretrained_files

SUFFIX = ".safetensors"


def export(pipe: PipelineParts, path: str | os.PathLike[str]) -> None:
    """Write the weights to a new path. Every rank has to call, between two steps."""
    ranks, rank = pipe.ranks, pipe.ranks.world.rank
    final = same_path(ranks, path)

    def described() -> dict[str, Any]:
        require_nothing_at(final)
        beside = beside_weights(final, pretrained_files(pipe.model))
        home = homes(ranks, pipe.split)
        tensors.update({name: tensor for name, tensor in state_of(pipe.model).items() if home[name] == rank})
        return {"forms": {name: asdict(Form.of(name, tensor)) for name, tensor in tensors.items()}, "beside": beside}

    tensors: dict[str, Any] = {}
    with patient(ranks):
        parts = together(ranks, f"to write {final}", described)
        forms = {name: Form(**form) for part in parts for name, form in part["forms"].items()}
    layout = FileLayout(forms)
    write_new(
        ranks,
        final,
        lambda directory: layout.begin(directory / FILE),
        lambda directory: layout.write(directory / FILE, tensors.items()),
        lambda directory, _: write_beside(directory, parts[0]["beside"]),
        None if parts[0]["beside"] else FILE,
    )


def beside_weights(final: Path, pretrained: dict[str, str] | None) -> dict[str, str]:
    """Return the files that go with the weights into a directory; none for a single file of weights."""
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


WEIGHTS = "model."  # prefix of the names of a checkpoint's weights


def export_checkpoint(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint's weights to a new path: a safetensors file, or a transformers directory."""
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
    layout = FileLayout({name: Form(records[key].dtype, records[key].shape) for name, key in names.items()})
    write_new(
        Ranks(Alone(), ((0,),)),
        final,
        lambda new: layout.begin(new / FILE),
        lambda new: layout.write(new / FILE, _tensors(directory, records, names)),
        lambda new, _: write_beside(new, beside),
        None if beside else FILE,
    )


def _tensors(directory: Path, records: Records, names: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors one after the other, each read once."""
    every: dict[str, list[str]] = {}
    for name, key in names.items():
        every.setdefault(key, []).append(name)
    for key, same in every.items():
        tensor = read_tensors(directory, {key: records[key]})[key]
        yield from ((name, tensor) for name in same)
