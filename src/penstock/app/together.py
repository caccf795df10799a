"""What all ranks do to files together: on one path, and with one outcome for all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from penstock.app.crew import Crew
from penstock.core.validation import require_path
from penstock.engine.world import World
from penstock.errors import FormatError, InputError

T = TypeVar("T")

PATIENCE = 1800.0  # seconds that ranks wait for one whose disk is slow; a dead one is found at once


def same_path(crew: Crew, path: str | os.PathLike[str]) -> Path:
    """The path as rank 0 sees it; ranks may run in different directories."""
    require_path(path)
    told = crew.world.gather(json.dumps([os.fspath(path), str(Path(path).absolute())]).encode())
    every = [json.loads(part) for part in told]
    for rank, (theirs, _) in enumerate(every):
        if theirs != every[0][0]:
            raise InputError(
                "the same path on every rank", f"{every[0][0]} on rank 0 and {theirs} on rank {rank}", "give one path"
            )
    return Path(every[0][1])


def together(crew: Crew, trying: str, act: Callable[[], T]) -> list[T]:
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


@contextmanager
def patient(crew: Crew) -> Iterator[None]:
    """Around work on files: ranks wait longer for each other."""
    if not isinstance(crew.world, World):
        yield
        return
    watch = crew.world.watch
    before, watch.timeout = watch.timeout, max(watch.timeout, PATIENCE)
    try:
        yield
    finally:
        watch.timeout = before


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
