"""What a slot does, as boxes on its line: from the rows of a timeline, times counted from its first moment."""

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
    """Boxes in the order of slots and, within a slot, of starts: slot s holds boxes at[s] to at[s + 1]."""

    schedule: Schedule
    row: LongArray  # of the schedule; an overlapped pair is one box, named by its forward
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
        """A column of the schedule's rows, one entry a box."""
        values: IntArray = getattr(self.schedule.rows, name)[self.row]
        return values


def busy(timeline: Timeline) -> Boxes:
    """Everything that occupies the slot itself: computing, updating, gathering and dropping parameters."""
    op = timeline.schedule.rows.op
    mask = (op <= Op.FB) | (op >= Op.UPDATE)
    mask[1:] &= op[:-1] != Op.FB  # the second half of a pair is in the box of the first
    return _boxes(timeline, mask)


def beside(timeline: Timeline) -> Boxes:
    """Reductions: they run beside the compute of their slot."""
    return _boxes(timeline, timeline.schedule.rows.op == Op.REDUCE)


def waits(timeline: Timeline) -> Boxes:
    """Receives that held their slot up."""
    late = timeline.end > timeline.start
    return _boxes(timeline, late & np.isin(timeline.schedule.rows.op, WAITS))


def _boxes(timeline: Timeline, mask: npt.NDArray[np.bool_]) -> Boxes:
    schedule = timeline.schedule
    row = np.flatnonzero(mask)
    slot = schedule.slot_of_rows()[row]
    order = np.lexsort((row, timeline.start[row], slot))  # clocks of a measured run may disagree with the list's order
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
