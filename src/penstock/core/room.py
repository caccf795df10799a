"""The memory of this machine: what cannot fit into it is refused at once, and not when it has run out."""

from __future__ import annotations

import os
from functools import cache
from math import inf
from pathlib import Path

from penstock.core.given import shown
from penstock.errors import InputError

BYTES = 150  # of a compute action that is built, lowered, checked and timed; measured 170 at its peak
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@cache
def memory_here() -> float:
    """Bytes that this process can have at most, infinite where nobody says."""
    try:
        found = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        found = inf
    return min(found, *map(_limit, LIMITS))


def _limit(file: Path) -> float:
    """What a container is allowed; 'max' is no limit."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return inf


def require_room(actions: int) -> None:
    """Refuse a schedule of so many compute actions if this machine cannot hold and time it."""
    most = memory_here() / BYTES
    if actions > most:
        raise InputError(
            f"at most {most:.3g} forwards and backwards, which {memory_here() / 2**30:.3g} GiB of memory hold",
            shown(actions),
            "ask for fewer micro-batches, mini-batches or stages",
        )
