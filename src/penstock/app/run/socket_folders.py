"""Directories that killed processes would leave behind.

Processes that load data keep the sockets by which they hand tensors over in a directory of their own, and remove it
when they end by themselves. The launcher kills what a failed rank has started, and so removes it in their place.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
FOLDER = re.compile(r"pymp-[\w-]+")  # as multiprocessing names them


def socket_folders(group: int) -> set[Path]:
    """Of the processes of a group that run; none where the system does not tell who holds which socket."""
    try:
        bound = _bound_sockets((PROC / "net/unix").read_text(errors="replace"))
        held = {inode for pid in _members(group) for inode in _sockets(pid)}
    except OSError:
        return set()
    return {path.parent for inode, path in bound.items() if inode in held and FOLDER.fullmatch(path.parent.name)}


def remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _bound_sockets(table: str) -> dict[str, Path]:
    """The paths of sockets that have one, by inode."""
    rows = (line.split(maxsplit=7) for line in table.splitlines()[1:])
    return {row[6]: Path(row[7]) for row in rows if len(row) == 8 and row[7].startswith("/")}


def _members(group: int) -> list[int]:
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            if fields[2:3] == [str(group)]:
                found.append(int(entry.name))
    return found


def _sockets(pid: int) -> list[str]:
    """Inodes of the sockets that a process has open."""
    found = []
    try:
        for entry in (PROC / str(pid) / "fd").iterdir():
            link = str(entry.readlink())
            if link.startswith("socket:["):
                found.append(link[len("socket:[") : -1])
    except OSError:  # it has ended meanwhile, or is somebody else's
        pass
    return found
