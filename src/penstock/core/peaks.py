"""The most that every slot holds: what `Memory` says row by row, in one pass and without the rows."""

from __future__ import annotations

import numpy as np

from penstock.core.cost import Costs, shares
from penstock.core.jit import kernel
from penstock.core.links import FloatArray
from penstock.core.marks import BORN, DEAD, FIRST, FREED, LAST, MADE, MarkArray, marks
from penstock.core.memory import activation_tables, standing
from penstock.core.schedule import LongArray, OpArray, Schedule
from penstock.core.shape import IntArray


def peaks(schedule: Schedule, costs: Costs) -> FloatArray:
    """Bytes of every slot of a lowered schedule, of all kinds."""
    tables, rows, foot = activation_tables(costs, shares(schedule.shape)), schedule.rows, costs.footprint
    begun, ended = (sum((table[at] for table in tables.kinds.values()), 0.0) for at in (0, 1))
    top = np.zeros(schedule.shape.slots)
    _top(
        len(rows),
        *(rows.op, rows.stage, schedule.starts, marks(schedule)),
        *(begun, ended, tables.copy, foot.gradients, foot.weights, top),
    )
    always: FloatArray = sum(standing(schedule.shape, costs).values(), top)
    return always


@kernel
def _top(
    op: OpArray, stage: IntArray, starts: LongArray, mark: MarkArray,
    begun: FloatArray, ended: FloatArray, copy: FloatArray, gradients: FloatArray, weights: FloatArray,
    top: FloatArray,
) -> None:  # fmt: skip
    for slot in range(len(top)):
        level, most = 0.0, 0.0
        for row in range(starts[slot], starts[slot + 1]):
            o, s, m = op[row], stage[row], mark[row]
            level += begun[o, s]
            if m & FIRST:
                level += copy[s]
            if m & MADE:
                level += gradients[s]
            if m & BORN:
                level += weights[s]
            most = max(most, level)
            level += ended[o, s]
            if m & LAST:
                level -= copy[s]
            if m & FREED:
                level -= gradients[s]
            if m & DEAD:
                level -= weights[s]
            most = max(most, level)
        top[slot] = most
