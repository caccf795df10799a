"""Rows at which a slot's memory changes for another reason than the row's own activations.

    FIRST_FORWARD, LAST_BACKWARD         a stage's first forward and last backward on its slot
    GRADIENT_ALLOCATED, GRADIENT_FREED   the first gradient for an update, and the update that uses it
    VERSION_KEPT, VERSION_FREED          an update whose old weights are used later, and their last use

A version is kept until its last use, and the newest one always. An update whose old version is not used later replaces
it and changes nothing.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np
import numpy.typing as npt

from penstock.core.action import Op
from penstock.core.jit import kernel
from penstock.core.schedule import LongArray, OpArray, Schedule
from penstock.core.shape import IntArray, Law


class MemoryEvent(IntFlag):
    FIRST_FORWARD = 1
    LAST_BACKWARD = 2
    GRADIENT_ALLOCATED = 4
    GRADIENT_FREED = 8
    VERSION_KEPT = 16
    VERSION_FREED = 32


EventArray = npt.NDArray[np.uint8]

F, B, I, W, FB, UPDATE = int(Op.F), int(Op.B), int(Op.I), int(Op.W), int(Op.FB), int(Op.UPDATE)
FIRST_FORWARD, LAST_BACKWARD, GRADIENT_ALLOCATED, GRADIENT_FREED, VERSION_KEPT, VERSION_FREED = map(int, MemoryEvent)


def memory_events(schedule: Schedule) -> EventArray:
    """Return the events of every row of a lowered schedule."""
    shape, rows = schedule.shape, schedule.rows
    events = np.zeros(len(rows), dtype=np.uint8)
    versions = 0 if shape.law is Law.SYNC else int(rows.version.max(initial=0)) + 1
    _find(len(rows), rows.op, rows.stage, rows.version, schedule.starts, shape.stages, versions, events)
    return events


@kernel
def _find(
    op: OpArray, stage: IntArray, version: IntArray, starts: LongArray, stages: int, versions: int, events: EventArray
) -> None:
    begun = np.full(stages, -1, dtype=np.int64)  # the last slot on which a stage had a forward, ...
    ended = np.full(stages, -1, dtype=np.int64)  # ... a backward
    gradient = np.full(stages, -1, dtype=np.int64)  # ... a gradient that no update has used yet
    used = np.full((stages, versions), -1, dtype=np.int64)  # the last row that uses a version
    for slot in range(len(starts) - 1):
        first, last = starts[slot], starts[slot + 1]
        for row in range(first, last):
            o, s = op[row], stage[row]
            if (o == F or o == FB) and begun[s] != slot:
                begun[s] = slot
                events[row] |= FIRST_FORWARD
            elif (o == B or o == W) and gradient[s] != slot:
                gradient[s] = slot
                events[row] |= GRADIENT_ALLOCATED
            elif o == UPDATE and gradient[s] == slot:
                gradient[s] = -1
                events[row] |= GRADIENT_FREED
        for row in range(last - 1, first - 1, -1):  # backwards, so that the first one read is the last in the list
            o, s = op[row], stage[row]
            if (o == B or o == I) and ended[s] != slot:
                ended[s] = slot
                events[row] |= LAST_BACKWARD
            if versions > 0 and o <= FB and used[s, version[row]] < first:
                used[s, version[row]] = row
            elif versions > 0 and o == UPDATE and used[s, version[row] - 1] > row:
                events[row] |= VERSION_KEPT
                events[used[s, version[row] - 1]] |= VERSION_FREED
