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
from penstock.training.processes import Crew

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


NAME = re.compile(r".+\.tmp-(?P<host>[0-9a-f]{8})-[0-9a-f]{8}")
# what may lie in one; a directory with anything else is somebody's own
OURS = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|penstock\.json|model\.safetensors|(generation_)?config\.json")
TRIES = 100


def write_new(
    crew: Crew,
    final: Path,
    begin: Callable[[Path], None],
    write: Callable[[Path], T],
    end: Callable[[Path, list[T]], None],
    only: str | None = None,
) -> None:
    """Have all ranks write something that is at `final` when it is whole, and not at all if anything goes wrong.

    Rank 0 begins and ends it, and all ranks write, into one directory; `only` is the name of the file in it that is to
    be at `final`, or None for the directory itself. Whatever fails on any rank is one error on all.
    """
    first, trying = crew.world.rank == 0, f"to write {final}"
    begun: list[Unfinished] = []

    def start() -> str:
        if not first:
            return ""
        clean(final.parent)
        begun.append(Unfinished(final))
        begin(begun[0].path)
        return str(begun[0].path)

    with patient(crew):
        try:
            directory = Path(together(crew, trying, start)[0])
            parts = together(crew, trying, lambda: write(directory))
            together(crew, trying, lambda: begun[0].finish(lambda: end(directory, parts), only) if first else None)
        finally:
            for unfinished in begun:
                unfinished.drop()


class Unfinished:
    """A directory beside a path where nothing is yet, locked for as long as this process writes to it."""

    def __init__(self, final: Path) -> None:
        require_nothing_at(final)
        final.parent.mkdir(parents=True, exist_ok=True)
        self.final = final
        self.path, self.lock = _made(final)

    def finish(self, end: Callable[[], None], only: str | None) -> None:
        """Give it its name."""
        end()
        require_nothing_at(self.final)
        (self.path if only is None else self.path / only).rename(self.final)
        sync(self.final.parent)

    def drop(self) -> None:
        """Remove what is left under the name of its own, and let go of the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def clean(folder: Path) -> None:
    """Remove what processes of this host that have ended left unfinished in a folder."""
    with suppress(OSError):
        for path in list(folder.iterdir()):
            name = NAME.fullmatch(path.name)
            if name and name["host"] == _host() and path.is_dir() and not path.is_symlink():
                with _locked(path) as free:
                    if free and all(OURS.fullmatch(file.name) for file in path.iterdir()):
                        shutil.rmtree(path, ignore_errors=True)


def require_nothing_at(final: Path) -> None:
    """Refuse a path that something is at."""
    if os.path.lexists(final):
        advice = "nothing is overwritten: give a new path, such as one with the step in its name"
        raise InputError("a path where nothing is yet", f"{final}, which exists", advice)


def sync(path: Path) -> None:
    """Wait until a file, or what a directory lists, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _made(final: Path) -> tuple[Path, int]:
    """A new directory and its lock. Somebody who clears up may take it before it is locked: then there is another."""
    for _ in range(TRIES):
        path = final.with_name(f"{final.name}.tmp-{_host()}-{secrets.token_hex(4)}")
        path.mkdir()
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a file system without locks: nobody will take it for free
                fcntl.flock(fd, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(fd)):
                return path, fd
            os.close(fd)
    raise OSError(f"directories beside {final} are removed as fast as they are made")


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether a directory is nobody's, and ours meanwhile."""
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
