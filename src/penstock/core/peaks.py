"""Peak memory of every slot, computed in one pass without the levels by row that `MemoryUse` holds."""

from __future__ import annotations

import numpy as np

from penstock.core.cost import Costs, shares
from penstock.core.jit import kernel
from penstock.core.links import FloatArray
from penstock.core.memory import activation_tables, standing
from penstock.core.memory_events import (
    FIRST_FORWARD,
    GRADIENT_ALLOCATED,
    GRADIENT_FREED,
    LAST_BACKWARD,
    VERSION_FREED,
    VERSION_KEPT,
    EventArray,
    memory_events,
)
from penstock.core.schedule import LongArray, OpArray, Schedule
from penstock.core.shape import IntArray


def peaks(schedule: Schedule, costs: Costs) -> FloatArray:
    """Return the peak bytes of every slot of a lowered schedule, over all kinds."""
    tables, rows, foot = activation_tables(costs, shares(schedule.shape)), schedule.rows, costs.footprint
    begun, ended = (sum((table[at] for table in tables.kinds.values()), 0.0) for at in (0, 1))
    top = np.zeros(schedule.shape.slots)
    _top(
        len(rows),
        *(rows.op, rows.stage, schedule.starts, memory_events(schedule)),
        *(begun, ended, tables.copy, foot.gradients, foot.weights, top),
    )
    always: FloatArray = sum(standing(schedule.shape, costs).values(), top)
    return always


@kernel
def _top(
    op: OpArray, stage: IntArray, starts: LongArray, event: EventArray,
    begun: FloatArray, ended: FloatArray, copy: FloatArray, gradients: FloatArray, weights: FloatArray,
    top: FloatArray,
) -> None:  # fmt: skip
    for slot in range(len(top)):
        level, most = 0.0, 0.0
        for row in range(starts[slot], starts[slot + 1]):
            o, s, m = op[row], stage[row], event[row]
            level += begun[o, s]
            if m & FIRST_FORWARD:
                level += copy[s]
            if m & GRADIENT_ALLOCATED:
                level += gradients[s]
            if m & VERSION_KEPT:
                level += weights[s]
            most = max(most, level)
            level += ended[o, s]
            if m & LAST_BACKWARD:
                level -= copy[s]
            if m & GRADIENT_FREED:
                level -= gradients[s]
            if m & VERSION_FREED:
                level -= weights[s]
            most = max(most, level)
        top[slot] = most
