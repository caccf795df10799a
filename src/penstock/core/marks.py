"""Which rows of a schedule change what its slots hold, beside what every row of that operation changes.

    FIRST, LAST    a stage's first forward and last backward on its slot
    MADE, FREED    the first gradient of a round, and the update that uses it
    BORN, DEAD     an update whose old weights somebody still needs, and their last use

A version lives until its last use, the newest one in any case. An update whose old version nobody needs any more
replaces it and changes nothing.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np
import numpy.typing as npt

from penstock.core.action import Op
from penstock.core.jit import kernel
from penstock.core.schedule import LongArray, OpArray, Schedule
from penstock.core.shape import IntArray, Law


class Mark(IntFlag):
    FIRST = 1
    LAST = 2
    MADE = 4
    FREED = 8
    BORN = 16
    DEAD = 32


MarkArray = npt.NDArray[np.uint8]

F, B, I, W, FB, UPDATE = int(Op.F), int(Op.B), int(Op.I), int(Op.W), int(Op.FB), int(Op.UPDATE)
FIRST, LAST, MADE, FREED, BORN, DEAD = (int(mark) for mark in Mark)


def marks(schedule: Schedule) -> MarkArray:
    """Of every row."""
    shape, rows = schedule.shape, schedule.rows
    found = np.zeros(len(rows), dtype=np.uint8)
    versions = 0 if shape.law is Law.SYNC else int(rows.version.max(initial=0)) + 1
    _mark(len(rows), rows.op, rows.stage, rows.version, schedule.starts, shape.stages, versions, found)
    return found


@kernel
def _mark(
    op: OpArray, stage: IntArray, version: IntArray, starts: LongArray, stages: int, versions: int, found: MarkArray
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
                found[row] |= FIRST
            elif (o == B or o == W) and gradient[s] != slot:
                gradient[s] = slot
                found[row] |= MADE
            elif o == UPDATE and gradient[s] == slot:
                gradient[s] = -1
                found[row] |= FREED
        for row in range(last - 1, first - 1, -1):  # backwards: the first that is met is the last
            o, s = op[row], stage[row]
            if (o == B or o == I) and ended[s] != slot:
                ended[s] = slot
                found[row] |= LAST
            if versions > 0 and o <= FB and used[s, version[row]] < first:
                used[s, version[row]] = row
            elif versions > 0 and o == UPDATE and used[s, version[row] - 1] > row:
                found[row] |= BORN
                found[used[s, version[row] - 1]] |= DEAD
