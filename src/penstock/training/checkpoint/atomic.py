"""Write files by all ranks together, or not at all.

Files are written beside their path, synced, and renamed when they are whole. Whether it went well is agreed by all
ranks: either all have succeeded, or all raise the same error.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from penstock.comm.world.world import World
from penstock.core.validation import require_path
from penstock.errors import FormatError, InputError
from penstock.training.processes import Ranks

T = TypeVar("T")

PATIENCE = 1800.0  # seconds that ranks wait for one whose disk is slow; a dead one is found at once


def same_path(ranks: Ranks, path: str | os.PathLike[str]) -> Path:
    """Return the path as rank 0 resolves it; ranks may run in different directories."""
    require_path(path)
    gathered = ranks.world.gather(json.dumps([os.fspath(path), str(Path(path).absolute())]).encode())
    every = [json.loads(part) for part in gathered]
    for rank, (theirs, _) in enumerate(every):
        if theirs != every[0][0]:
            raise InputError(
                "the same path on every rank", f"{every[0][0]} on rank 0 and {theirs} on rank {rank}", "give one path"
            )
    return Path(every[0][1])


def together(ranks: Ranks, trying: str, act: Callable[[], T]) -> list[T]:
    """Act on every rank; return the results of all ranks on each, or raise one error on all."""
    outcome: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        outcome["said"] = act()
    except Exception as error:
        failure, outcome["error"] = error, _encoded(error, trying)
    every = [json.loads(part) for part in ranks.world.gather(json.dumps(outcome).encode())]
    failed = {rank: part["error"] for rank, part in enumerate(every) if "error" in part}
    if failed:
        raise _error(failed, ranks.world.size) from failure
    return [part["said"] for part in every]


@contextmanager
def patient(ranks: Ranks) -> Iterator[None]:
    """Work on files inside: ranks wait longer for each other."""
    if not isinstance(ranks.world, World):
        yield
        return
    watch = ranks.world.watch
    before, watch.timeout = watch.timeout, max(watch.timeout, PATIENCE)
    try:
        yield
    finally:
        watch.timeout = before


def _encoded(error: Exception, trying: str) -> dict[str, Any]:
    if isinstance(error, InputError):
        where = error.where if isinstance(error, FormatError) else None
        return {"where": where, "parts": [error.expected, str(error.came), error.do]}
    said = f"{type(error).__name__}: {error}"
    return {"where": None, "parts": [trying, said, "look at its disk; nothing has changed, and training can go on"]}


def _error(failed: dict[int, dict[str, Any]], size: int) -> InputError:
    """Return the first failed rank's error; the rank is named unless all have the same one."""
    rank, encoded = next(iter(failed.items()))
    expected, came, do = encoded["parts"]
    if len(failed) < size or any(other != encoded for other in failed.values()):
        came = f"on rank {rank} {came}"
    return (
        InputError(expected, came, do)
        if encoded["where"] is None
        else FormatError(encoded["where"], expected, came, do)
    )


NAME = re.compile(r".+\.tmp-(?P<host>[0-9a-f]{8})-[0-9a-f]{8}")
# the files that may be in one; a directory with any other file is not ours
OURS = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|penstock\.json|model\.safetensors|(generation_)?config\.json")
TRIES = 100


def write_new(
    ranks: Ranks,
    final: Path,
    begin: Callable[[Path], None],
    write: Callable[[Path], T],
    end: Callable[[Path, list[T]], None],
    only: str | None = None,
) -> None:
    """Have all ranks write something that appears at `final` when it is complete, and not at all after an error.

    Rank 0 begins and ends it, and all ranks write into one directory; `only` is the name of the file in it that becomes
    `final`, or None for the directory itself. A failure on any rank is one error on all.
    """
    first, trying = ranks.world.rank == 0, f"to write {final}"
    begun: list[Unfinished] = []

    def start() -> str:
        if not first:
            return ""
        clean(final.parent)
        begun.append(Unfinished(final))
        begin(begun[0].path)
        return str(begun[0].path)

    with patient(ranks):
        try:
            directory = Path(together(ranks, trying, start)[0])
            parts = together(ranks, trying, lambda: write(directory))
            together(ranks, trying, lambda: begun[0].finish(lambda: end(directory, parts), only) if first else None)
        finally:
            for unfinished in begun:
                unfinished.drop()


class Unfinished:
    """A directory beside a new path, locked for as long as this process writes to it."""

    def __init__(self, final: Path) -> None:
        require_nothing_at(final)
        final.parent.mkdir(parents=True, exist_ok=True)
        self.final = final
        self.path, self.lock = _new_directory(final)

    def finish(self, end: Callable[[], None], only: str | None) -> None:
        """Rename the complete directory, or the one file in it, to its path."""
        end()
        require_nothing_at(self.final)
        (self.path if only is None else self.path / only).rename(self.final)
        sync(self.final.parent)

    def drop(self) -> None:
        """Remove the directory if it was not renamed, and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def clean(folder: Path) -> None:
    """Remove unfinished directories in a folder whose processes on this host have ended."""
    with suppress(OSError):
        for path in list(folder.iterdir()):
            name = NAME.fullmatch(path.name)
            if name and name["host"] == _host() and path.is_dir() and not path.is_symlink():
                with _locked(path) as free:
                    if free and all(OURS.fullmatch(file.name) for file in path.iterdir()):
                        shutil.rmtree(path, ignore_errors=True)


def require_nothing_at(final: Path) -> None:
    """Raise for a path that exists."""
    if os.path.lexists(final):
        advice = "nothing is overwritten: give a new path, such as one with the step in its name"
        raise InputError("a path where nothing is yet", f"{final}, which exists", advice)


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of files, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _new_directory(final: Path) -> tuple[Path, int]:
    """Make a directory and lock it; try another if `clean` of another process removes it before it is locked."""
    for _ in range(TRIES):
        path = final.with_name(f"{final.name}.tmp-{_host()}-{secrets.token_hex(4)}")
        path.mkdir()
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a file system without locks: `clean` cannot lock it either
                fcntl.flock(fd, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(fd)):
                return path, fd
            os.close(fd)
    raise OSError(f"directories beside {final} are removed as fast as they are made")


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock a directory if no process has it locked; yield whether that worked."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"
