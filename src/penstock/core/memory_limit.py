"""The memory limit of this process, and the refusal of schedules that cannot fit into it."""

from __future__ import annotations

import os
from functools import cache
from math import inf
from pathlib import Path

from penstock.core.validation import shown
from penstock.errors import InputError

BYTES = 150  # per compute action of a schedule that is built, lowered, checked and simulated; 170 measured at the peak
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@cache
def memory_limit() -> float:
    """Return the most bytes that this process can use, infinity if unknown."""
    try:
        physical = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        physical = inf
    return min(physical, *map(_container_limit, LIMITS))


def _container_limit(file: Path) -> float:
    """Return the limit in a control group's file; 'max' is none."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return inf


def require_memory(actions: int) -> None:
    """Raise InputError if a schedule of so many compute actions does not fit into memory."""
    most = memory_limit() / BYTES
    if actions > most:
        raise InputError(
            f"at most {most:.3g} forwards and backwards, which {memory_limit() / 2**30:.3g} GiB of memory hold",
            shown(actions),
            "ask for fewer micro-batches, mini-batches or stages",
        )
