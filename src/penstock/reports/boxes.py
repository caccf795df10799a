"""The actions of each slot as boxes to draw, with times from the start of the timeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.action import Action, Op
from penstock.core.links import FloatArray
from penstock.core.schedule import LongArray, OpArray, Schedule
from penstock.core.shape import IntArray
from penstock.core.timeline import Timeline

WAITS = (Op.RECV_F, Op.RECV_B)


@dataclass(frozen=True, eq=False)
class Boxes:
    """Boxes ordered by slot, then by start: those of slot s are at[s] to at[s + 1] - 1."""

    schedule: Schedule
    row: LongArray  # of the schedule; an overlapped pair is one box, at the row of its forward
    slot: IntArray
    op: OpArray
    start: FloatArray
    end: FloatArray
    at: LongArray

    def __len__(self) -> int:
        return len(self.row)

    def of_slot(self, slot: int) -> range:
        return range(int(self.at[slot]), int(self.at[slot + 1]))

    def action(self, box: int) -> Action:
        return self.schedule.action(int(self.row[box]))

    def column(self, name: str) -> IntArray:
        """Return a column of the schedule's rows, one entry per box."""
        values: IntArray = getattr(self.schedule.rows, name)[self.row]
        return values


def busy(timeline: Timeline) -> Boxes:
    """Return the boxes of actions that occupy the slot: compute, updates, unshards and reshards."""
    op = timeline.schedule.rows.op
    mask = (op <= Op.FB) | (op >= Op.UPDATE)
    mask[1:] &= op[:-1] != Op.FB  # a pair is one box, at its first row
    return _boxes(timeline, mask)


def beside(timeline: Timeline) -> Boxes:
    """Return the boxes of reductions, which overlap with their slot's compute."""
    return _boxes(timeline, timeline.schedule.rows.op == Op.REDUCE)


def waits(timeline: Timeline) -> Boxes:
    """Return the boxes of receives for which their slot waited."""
    late = timeline.end > timeline.start
    return _boxes(timeline, late & np.isin(timeline.schedule.rows.op, WAITS))


def _boxes(timeline: Timeline, mask: npt.NDArray[np.bool_]) -> Boxes:
    schedule = timeline.schedule
    row = np.flatnonzero(mask)
    slot = schedule.slot_of_rows()[row]
    order = np.lexsort((row, timeline.start[row], slot))  # a measured run's times may deviate from the list's order
    row, slot = row[order], slot[order]
    origin = timeline.start.min() if len(timeline.start) else 0.0
    return Boxes(
        schedule=schedule,
        row=row,
        slot=slot,
        op=schedule.rows.op[row],
        start=timeline.start[row] - origin,
        end=timeline.end[row] - origin,
        at=np.searchsorted(slot, np.arange(schedule.shape.slots + 1)).astype(np.int64),
    )
