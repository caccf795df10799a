"""Directories that killed data-loading processes would leave behind.

Such processes keep the sockets through which they pass tensors in a directory of their own, and remove it when they end
normally. The launcher kills the children of a failed rank, and so removes the directory for them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
FOLDER = re.compile(r"pymp-[\w-]+")  # as multiprocessing names them


def socket_folders(group: int) -> set[Path]:
    """Return the socket directories of the running processes of a group; none where the system does not show the owners
    of sockets."""
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
    """Return the paths of named sockets by inode."""
    rows = (line.split(maxsplit=7) for line in table.splitlines()[1:])
    return {row[6]: Path(row[7]) for row in rows if len(row) == 8 and row[7].startswith("/")}


def _members(group: int) -> list[int]:
    pids = []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            if fields[2:3] == [str(group)]:
                pids.append(int(entry.name))
    return pids


def _sockets(pid: int) -> list[str]:
    """Return the inodes of the sockets that a process has open."""
    inodes = []
    try:
        for entry in (PROC / str(pid) / "fd").iterdir():
            link = str(entry.readlink())
            if link.startswith("socket:["):
                inodes.append(link[len("socket:[") : -1])
    except OSError:  # it has ended meanwhile, or belongs to another user
        pass
    return inodes
