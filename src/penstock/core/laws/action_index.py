"""The row of every compute action, in one table for all laws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.action import Op
from penstock.core.jit import kernel
from penstock.core.schedule import LongArray, OpArray, Schedule
from penstock.core.shape import IntArray

F, B, I, FB = int(Op.F), int(Op.B), int(Op.I), int(Op.FB)
SEND_F, RECV_F, SEND_B, RECV_B = int(Op.SEND_F), int(Op.RECV_F), int(Op.SEND_B), int(Op.RECV_B)

# Faults of a single row, by itself or at its position in its slot.
NO_STAGE, NO_MICROBATCH, ELSEWHERE, DOUBLED, LONE, SENT_EARLY, RECEIVED_LATE = range(1, 8)


@dataclass(frozen=True, eq=False)
class ActionIndex:
    """Rows of the forward, the backward (B or I) and the weight gradient, by (share, micro-batch); -1 for none.

    A share is one replica of a stage where replicas split micro-batches, and the whole stage where they take turns:
    share = first[stage] + (replica or 0).
    """

    first: IntArray
    forward: IntArray  # (shares, total)
    backward: IntArray
    weight: IntArray
    flaw: OpArray  # by row


def index_actions(schedule: Schedule) -> ActionIndex:
    """Return the index of a lowered schedule's compute actions."""
    shape, rows = schedule.shape, schedule.rows
    width = np.ones_like(shape.stage_replicas) if shape.turns else shape.stage_replicas
    first = np.concatenate(([0], np.cumsum(width))).astype(np.int32)
    forward, backward, weight = (np.full((int(first[-1]), shape.total), -1, dtype=np.int32) for _ in range(3))
    flaw = np.zeros(len(rows), dtype=np.uint8)
    _count(
        len(rows),
        *(rows.op, rows.stage, rows.microbatch, schedule.starts),
        *(shape.slot_rank, shape.slot_replica, shape.stage_rank, shape.stage_replicas, first),
        *(shape.total, shape.microbatches, shape.turns),
        *(forward, backward, weight, flaw),
    )
    return ActionIndex(first, forward, backward, weight, flaw)


@kernel
def _count(
    op: OpArray, stage: IntArray, microbatch: IntArray, starts: LongArray,
    slot_rank: IntArray, slot_replica: IntArray, stage_rank: IntArray, stage_replicas: IntArray, first: IntArray,
    total: int, per_batch: int, turns: bool,
    forward: IntArray, backward: IntArray, weight: IntArray, flaw: OpArray,
) -> None:  # fmt: skip
    for slot in range(len(slot_rank)):
        rank, own = slot_rank[slot], slot_replica[slot]
        for row in range(starts[slot], starts[slot + 1]):
            o, s, k = op[row], stage[row], microbatch[row]
            if not 0 <= s < len(stage_rank):
                flaw[row] = NO_STAGE
            elif stage_rank[s] != rank:
                flaw[row] = ELSEWHERE
            elif o <= RECV_B and not 0 <= k < total:
                flaw[row] = NO_MICROBATCH
            elif o <= RECV_B:
                if turns and (k // per_batch) % stage_replicas[s] != own:
                    flaw[row] = ELSEWHERE
                    continue
                share = first[s] if turns else first[s] + own
                if o == SEND_F or o == SEND_B:
                    if (forward if o == SEND_F else backward)[share, k] < 0:
                        flaw[row] = SENT_EARLY
                elif o == RECV_F or o == RECV_B:
                    if (forward if o == RECV_F else backward)[share, k] >= 0:
                        flaw[row] = RECEIVED_LATE
                elif o == F or o == FB:
                    if forward[share, k] >= 0:
                        flaw[row] = DOUBLED
                    else:
                        forward[share, k] = row
                        if o == FB and not (row + 1 < starts[slot + 1] and op[row + 1] == B):
                            flaw[row] = LONE
                elif o == B or o == I:
                    if backward[share, k] >= 0:
                        flaw[row] = DOUBLED
                    else:
                        backward[share, k] = row
                elif weight[share, k] >= 0:
                    flaw[row] = DOUBLED
                else:
                    weight[share, k] = row
