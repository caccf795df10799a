"""Save and load a pipeline's training state: any layout of stages loads what any other has saved.

A checkpoint is written beside its path, synced, and renamed when it is whole; nothing is ever overwritten. Whether it
went well is agreed by all ranks: either all have saved or loaded, or all raise the same error and can go on.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.app.checkpoint_files import Record, read_facts, read_tensors, sync, write_facts, write_tensors
from penstock.app.checkpoint_state import Loading, facts_of, merged, tensors_of
from penstock.app.crew import Crew
from penstock.engine.world import World
from penstock.errors import FormatError, InputError

if TYPE_CHECKING:
    from penstock.app.pipeline import Pipeline

T = TypeVar("T")

PATIENCE = 1800.0  # seconds that ranks wait for one whose disk is slow; a dead one is found at once


def save(pipe: Pipeline, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint to a path where nothing is yet. Every rank has to call, between two steps."""
    crew, first = pipe.crew, pipe.crew.world.rank == 0
    final = _same_path(crew, path)
    trying = f"to write the checkpoint {final}"
    with _patient(crew):
        begun = _together(crew, trying, lambda: str(_begin(final)) if first else "")
        directory = Path(begun[0])
        try:
            parts = _together(crew, trying, lambda: _written(pipe, directory))
            _together(crew, trying, lambda: _end(directory, final, parts) if first else None)
        except BaseException:
            if first:
                shutil.rmtree(directory, ignore_errors=True)
            raise


def require_room(pipe: Pipeline, folder: str, wanted: Callable[[str], bool]) -> None:
    """Refuse a folder that nothing can be written to, or that has what a name is wanted for. Every rank has to call."""
    place = _same_path(pipe.crew, folder)
    first = pipe.crew.world.rank == 0
    _together(pipe.crew, f"to write checkpoints to {place}", lambda: _try(place, wanted) if first else None)


def load(pipe: Pipeline, path: str | os.PathLike[str]) -> None:
    """Take up the training where a checkpoint was written. Every rank has to call, between two steps."""
    crew = pipe.crew
    directory = _same_path(crew, path)
    trying = f"to read the checkpoint {directory}"
    found: list[Loading] = []
    with _patient(crew):
        _together(crew, trying, lambda: found.append(_read(pipe, directory)))
        found[0].finish()


def _try(folder: Path, wanted: Callable[[str], bool]) -> None:
    """As a save will: a directory in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryDirectory(prefix="trial.tmp-", dir=folder).cleanup()
        there = sorted(file.name for file in folder.iterdir() if wanted(file.name))
    except OSError as error:
        came = f"{folder}: {error.strerror}"
        raise InputError("a directory that checkpoints can be written to", came, "change the path") from None
    if there:
        raise _taken(folder / there[0])


def _taken(final: Path) -> InputError:
    advice = "nothing is overwritten: give a new path for every checkpoint, such as checkpoints/step-100"
    return InputError("a path where nothing is yet", f"{final}, which exists", advice)


def _begin(final: Path) -> Path:
    """A new directory beside the final path."""
    if os.path.lexists(final):
        raise _taken(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    directory = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
    directory.mkdir()
    return directory


def _written(pipe: Pipeline, directory: Path) -> dict[str, Any]:
    """One rank's part: what it has written, and what else it knows."""
    facts = facts_of(pipe)
    records = write_tensors(directory, pipe.crew.world.rank, tensors_of(pipe))
    return {"facts": facts, "records": {name: asdict(record) for name, record in records.items()}}


def _end(directory: Path, final: Path, parts: list[dict[str, Any]]) -> None:
    """All ranks have written: the index, and then the name."""
    records = {name: Record.read(told) for part in parts for name, told in part["records"].items()}
    write_facts(directory, merged([part["facts"] for part in parts]), records)
    directory.rename(final)
    sync(final.parent)


def _read(pipe: Pipeline, directory: Path) -> Loading:
    """Everything that this rank needs, read and found to fit."""
    facts, records = read_facts(directory)
    try:
        loading = Loading(pipe, facts, records)
        loading.prepare(read_tensors(directory, loading.wanted()))
    except (LookupError, TypeError) as error:
        raise FormatError(
            str(directory), "a checkpoint", f"{type(error).__name__}: {error}", "use another one"
        ) from error
    return loading


def _same_path(crew: Crew, path: str | os.PathLike[str]) -> Path:
    """The path as rank 0 sees it; ranks may run in different directories."""
    told = crew.world.gather(json.dumps([os.fspath(path), str(Path(path).absolute())]).encode())
    every = [json.loads(part) for part in told]
    for rank, (theirs, _) in enumerate(every):
        if theirs != every[0][0]:
            raise InputError(
                "the same path on every rank", f"{every[0][0]} on rank 0 and {theirs} on rank {rank}", "give one path"
            )
    return Path(every[0][1])


def _together(crew: Crew, trying: str, act: Callable[[], T]) -> list[T]:
    """Act on every rank, and tell all how it went: what each has to say, or one error for all."""
    mine: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        mine["said"] = act()
    except Exception as error:
        failure, mine["error"] = error, _told(error, trying)
    every = [json.loads(part) for part in crew.world.gather(json.dumps(mine).encode())]
    failed = {rank: part["error"] for rank, part in enumerate(every) if "error" in part}
    if failed:
        raise _error(failed, crew.world.size) from failure
    return [part["said"] for part in every]


def _told(error: Exception, trying: str) -> dict[str, Any]:
    if isinstance(error, InputError):
        where = error.where if isinstance(error, FormatError) else None
        return {"where": where, "parts": [error.expected, str(error.came), error.do]}
    said = f"{type(error).__name__}: {error}"
    return {"where": None, "parts": [trying, said, "look at its disk; nothing has changed, and training can go on"]}


def _error(failed: dict[int, dict[str, Any]], size: int) -> InputError:
    """The first rank's; it is named unless all say the same."""
    rank, told = next(iter(failed.items()))
    expected, came, do = told["parts"]
    if len(failed) < size or any(other != told for other in failed.values()):
        came = f"on rank {rank} {came}"
    return InputError(expected, came, do) if told["where"] is None else FormatError(told["where"], expected, came, do)


@contextmanager
def _patient(crew: Crew) -> Iterator[None]:
    if not isinstance(crew.world, World):
        yield
        return
    watch = crew.world.watch
    before, watch.timeout = watch.timeout, max(watch.timeout, PATIENCE)
    try:
        yield
    finally:
        watch.timeout = before
