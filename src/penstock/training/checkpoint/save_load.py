"""Save and load a pipeline's training state: any layout of stages loads what any other has saved.

A checkpoint is written beside its path, synced, and renamed when it is complete; nothing is ever overwritten. All ranks
agree on the outcome: either all have saved or loaded, or all raise the same error and can go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import FormatError, InputError
from penstock.training.checkpoint.atomic import (
    Unfinished,
    clean,
    patient,
    require_nothing_at,
    same_path,
    together,
    write_new,
)
from penstock.training.checkpoint.contents import Loading, facts_of, merged, tensors_of
from penstock.training.checkpoint.files import (
    WRONG,
    Record,
    read_facts,
    read_tensors,
    write_facts,
    write_tensors,
)
from penstock.training.pipeline_parts import PipelineParts

T = TypeVar("T")


def save(pipe: PipelineParts, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint to a new path. Every rank has to call, between two steps."""
    final = same_path(pipe.ranks, path)
    write_new(pipe.ranks, final, lambda directory: None, lambda directory: _written(pipe, directory), _end)


def require_room(pipe: PipelineParts, folder: str, wanted: Callable[[str], bool]) -> None:
    """Raise for a folder that cannot be written to, or that has a wanted name already. Every rank has to call."""
    place = same_path(pipe.ranks, folder)
    first = pipe.ranks.world.rank == 0
    together(pipe.ranks, f"to write checkpoints to {place}", lambda: _try(place, wanted) if first else None)


def load(pipe: PipelineParts, path: str | os.PathLike[str]) -> None:
    """Continue the training of a checkpoint. Every rank has to call, between two steps."""
    ranks = pipe.ranks
    directory = same_path(ranks, path)
    trying = f"to read the checkpoint {directory}"
    loadings: list[Loading] = []
    with patient(ranks):
        together(ranks, trying, lambda: loadings.append(_read(pipe, directory)))
        loading = loadings[0]
        try:
            together(ranks, trying, lambda: _checked(directory, loading.take))
        except BaseException:
            loading.undo()
            raise
        loading.finish()


def _try(folder: Path, wanted: Callable[[str], bool]) -> None:
    """Make a directory in a folder, as a save will, and remove it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        Unfinished(folder / "trial").drop()
        there = sorted(file.name for file in folder.iterdir() if wanted(file.name))
    except OSError as error:
        came = f"{folder}: {error.strerror}"
        raise InputError("a directory that checkpoints can be written to", came, "change the path") from None
    if there:
        require_nothing_at(folder / there[0])


def _written(pipe: PipelineParts, directory: Path) -> dict[str, Any]:
    """Write one rank's tensors; return their records and the rank's facts."""
    facts = facts_of(pipe)
    records = write_tensors(directory, pipe.ranks.world.rank, tensors_of(pipe))
    return {"facts": facts, "records": {name: asdict(record) for name, record in records.items()}}


def _end(directory: Path, parts: list[dict[str, Any]]) -> None:
    """Write the index, after all ranks have written their tensors."""
    records = {name: Record.read(record) for part in parts for name, record in part["records"].items()}
    write_facts(directory, merged([part["facts"] for part in parts]), records)


def _read(pipe: PipelineParts, directory: Path) -> Loading:
    """Read and check everything that this rank needs."""
    facts, records = read_facts(directory)

    def prepared() -> Loading:
        loading = Loading(pipe, facts, records)
        loading.prepare(read_tensors(directory, loading.needed()))
        return loading

    return _checked(directory, prepared)


def _checked(directory: Path, act: Callable[[], T]) -> T:
    """Raise errors of a pipeline's parts about values that do not fit as errors of the checkpoint."""
    try:
        return act()
    except InputError:
        raise
    except WRONG as error:
        came = f"{type(error).__name__}: {error}"
        raise FormatError(str(directory), "a checkpoint", came, "it is damaged: use another one") from error
