"""Bytes that a middle rank keeps for receiving: those of the 4 MB sleeping pipeline, 4 ranks and 16 micro-batches.

The peer's: the buffers that its stage object holds after a step, one a micro-batch and direction. Ours: the most bytes
of received tensors that were in use at once. Ours are slots of shared memory, so those that wait to be received, and
those that are free, take memory too: `in_all` counts them.
"""

from __future__ import annotations

from benchmarks.workers.sleeping import SIZES
from benchmarks.workers.table import Line

SIZE, METHOD = "4 MB", "1f1b"
MIDDLE = (1, 2)  # of four ranks
LIVE = 3  # micro-batches between their forward and their backward on the first of those two


def lines(team, ours):
    peer = _most(team.ask("held", f"{SIZE} peer {METHOD}"))
    mine = _most(team.ask("held", f"{SIZE} ours {METHOD}")) if ours else None
    wanted = {"wanted": "at most 16 MiB", "value": mine / 2**20, "most": 16.0} if ours else {}
    yield Line(f"receive buffers, middle rank, {METHOD}", "bytes", mine, peer, LIVE * SIZES[SIZE] * 4, **wanted)


def in_all(team):
    """Bytes of all slots of the lanes that lead to a middle rank."""
    made = team.ask("slots", f"{SIZE} ours {METHOD}")
    return max(sum(found.get(rank, 0) for found in made) for rank in MIDDLE)


def _most(held):
    return max(held[rank] for rank in MIDDLE)
