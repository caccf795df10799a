"""Save and load a pipeline's training state: any layout of stages loads what any other has saved.

A checkpoint is written beside its path, synced, and renamed when it is whole; nothing is ever overwritten. Whether it
went well is agreed by all ranks: either all have saved or loaded, or all raise the same error and can go on.
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
    """Write a checkpoint to a path where nothing is yet. Every rank has to call, between two steps."""
    final = same_path(pipe.crew, path)
    write_new(pipe.crew, final, lambda directory: None, lambda directory: _written(pipe, directory), _end)


def require_room(pipe: PipelineParts, folder: str, wanted: Callable[[str], bool]) -> None:
    """Refuse a folder that nothing can be written to, or that has what a name is wanted for. Every rank has to call."""
    place = same_path(pipe.crew, folder)
    first = pipe.crew.world.rank == 0
    together(pipe.crew, f"to write checkpoints to {place}", lambda: _try(place, wanted) if first else None)


def load(pipe: PipelineParts, path: str | os.PathLike[str]) -> None:
    """Take up the training where a checkpoint was written. Every rank has to call, between two steps."""
    crew = pipe.crew
    directory = same_path(crew, path)
    trying = f"to read the checkpoint {directory}"
    found: list[Loading] = []
    with patient(crew):
        together(crew, trying, lambda: found.append(_read(pipe, directory)))
        loading = found[0]
        try:
            together(crew, trying, lambda: _checked(directory, loading.take))
        except BaseException:
            loading.undo()
            raise
        loading.finish()


def _try(folder: Path, wanted: Callable[[str], bool]) -> None:
    """As a save will: a directory in it."""
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
    """One rank's part: what it has written, and what else it knows."""
    facts = facts_of(pipe)
    records = write_tensors(directory, pipe.crew.world.rank, tensors_of(pipe))
    return {"facts": facts, "records": {name: asdict(record) for name, record in records.items()}}


def _end(directory: Path, parts: list[dict[str, Any]]) -> None:
    """All ranks have written: the index."""
    records = {name: Record.read(told) for part in parts for name, told in part["records"].items()}
    write_facts(directory, merged([part["facts"] for part in parts]), records)


def _read(pipe: PipelineParts, directory: Path) -> Loading:
    """Everything that this rank needs, read and found to fit."""
    facts, records = read_facts(directory)

    def prepared() -> Loading:
        loading = Loading(pipe, facts, records)
        loading.prepare(read_tensors(directory, loading.wanted()))
        return loading

    return _checked(directory, prepared)


def _checked(directory: Path, act: Callable[[], T]) -> T:
    """Whatever a pipeline's parts say of values that do not suit them is said of the checkpoint."""
    try:
        return act()
    except InputError:
        raise
    except WRONG as error:
        came = f"{type(error).__name__}: {error}"
        raise FormatError(str(directory), "a checkpoint", came, "it is damaged: use another one") from error
