"""Memory over time: a step function for every slot, by kind.

Times are those of the actions that occupy the slot. A send or a reduction overlaps with them, so that its change of
memory is drawn at the moment the slot started it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.core.action import Op
from penstock.core.links import FloatArray
from penstock.core.memory import MemoryKind, MemoryUse
from penstock.core.timeline import Timeline
from penstock.reports.palette import STACK

BESIDE = (Op.SEND_F, Op.SEND_B, Op.REDUCE)


@dataclass(frozen=True, eq=False)
class Curve:
    """Levels of one slot: `levels[kind][i]` is the level from times[i] to times[i + 1]."""

    times: FloatArray
    levels: dict[MemoryKind, FloatArray]

    @property
    def total(self) -> FloatArray:
        return sum(self.levels.values(), np.zeros(len(self.times)))

    @property
    def peak(self) -> float:
        return float(self.total.max(initial=0.0))

    def thinned(self, step: float) -> Curve:
        """Return at most two points per interval of `step` seconds: the highest, to keep peaks, and the last."""
        cell = np.floor(self.times / step).astype(np.int64)
        order = np.lexsort((self.total, cell))
        last_of_cell = np.append(cell[1:] != cell[:-1], True)
        highest = order[np.append(cell[order][1:] != cell[order][:-1], True)]
        keep = np.union1d(highest, np.flatnonzero(last_of_cell))
        return Curve(self.times[keep], {kind: level[keep] for kind, level in self.levels.items()})


def curves(timeline: Timeline) -> list[Curve]:
    """Return one curve per slot, of the kinds that are ever above 0; an empty list if memory is unknown."""
    memory = timeline.memory
    if memory is None:
        return []
    clock = _clock(timeline)
    kinds = [kind for kind in STACK if _is_used(memory, kind)]
    starts = timeline.schedule.starts
    return [
        _curve(memory, kinds, clock[2 * starts[slot] : 2 * starts[slot + 1]], slot, int(starts[slot]))
        for slot in range(timeline.schedule.shape.slots)
    ]


def _is_used(memory: MemoryUse, kind: MemoryKind) -> bool:
    return any(kind in part and bool(part[kind].any()) for part in (memory.standing, memory.begun, memory.ended))


def _clock(timeline: Timeline) -> FloatArray:
    """Return start and end of every row on its slot, alternating, in seconds from the start of the timeline."""
    op = timeline.schedule.rows.op
    start, end = timeline.start.copy(), timeline.end.copy()
    end[op == Op.FB] = start[op == Op.FB]  # its forward's activations exist while its backward runs
    beside = np.isin(op, BESIDE)
    start[beside] = end[beside] = -np.inf  # replaced by the moment before
    clock = np.stack((start, end), axis=1)
    for first, last in pairwise(timeline.schedule.starts.tolist()):
        clock[first:last] = np.maximum.accumulate(clock[first:last].ravel()).reshape(-1, 2)
    origin = timeline.start.min() if len(start) else 0.0
    return np.maximum(clock.ravel() - origin, 0.0)


def _curve(memory: MemoryUse, kinds: list[MemoryKind], times: FloatArray, slot: int, first: int) -> Curve:
    rows = slice(first, first + len(times) // 2)
    levels = {}
    for kind in kinds:
        level = np.zeros(len(times) + 1)
        if kind in memory.begun:
            level[1:] = np.stack((memory.begun[kind][rows], memory.ended[kind][rows]), axis=1).ravel()
        levels[kind] = level + (memory.standing[kind][slot] if kind in memory.standing else 0.0)
    steps = [level[1:] != level[:-1] for level in levels.values()]
    keep = np.append(True, np.any(steps, axis=0) if steps else np.zeros(len(times), dtype=np.bool_))
    return Curve(np.append(0.0, times)[keep], {kind: level[keep] for kind, level in levels.items()})
