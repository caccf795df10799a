"""Pair each send with its receive, by edge, micro-batch and the two replicas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.action import Op
from penstock.core.jit import helper, kernel
from penstock.core.schedule import LongArray, OpArray, Schedule
from penstock.core.shape import IntArray

SEND_F, RECV_F, SEND_B, RECV_B = int(Op.SEND_F), int(Op.RECV_F), int(Op.SEND_B), int(Op.RECV_B)

STRAY, DOUBLED = 1, 2  # faults of a single transfer: no such edge or replica; a second one of the same tensor


@dataclass(frozen=True, eq=False)
class Match:
    """Rows of sends and receives by (way, lane, micro-batch), -1 for none. Way 0 is forward, 1 backward."""

    sends: IntArray  # (2, lanes, total)
    receives: IntArray
    lane: IntArray  # of every transfer row that has one; undefined for other rows
    flaw: OpArray  # STRAY or DOUBLED, by row
    target: IntArray  # (2, lanes): the slot that receives


def match(schedule: Schedule) -> Match:
    """Return the paired transfers of a lowered schedule."""
    shape, rows, near = schedule.shape, schedule.rows, schedule.shape.neighbours
    lanes = int(near.edge_lane[-1])
    sends = np.full((2, lanes, shape.total), -1, dtype=np.int32)
    receives = np.full((2, lanes, shape.total), -1, dtype=np.int32)
    lane = np.empty(len(rows), dtype=np.int32)
    flaw = np.zeros(len(rows), dtype=np.uint8)
    _match(
        len(rows),
        *(rows.op, rows.stage, rows.microbatch, rows.peer, rows.replica, schedule.starts),
        *(shape.slot_rank, shape.slot_replica, shape.stage_rank, shape.stage_replicas),
        *(near.after_at, near.after, near.after_lane),
        *(shape.total, shape.microbatches, shape.turns),
        *(sends, receives, lane, flaw),
    )
    target = np.full((2, lanes), -1, dtype=np.int32)
    target[:, shape.lanes.number] = shape.lanes.target, shape.lanes.source
    return Match(sends, receives, lane, flaw, target)


@helper
def _lane(
    a: int,
    i: int,
    b: int,
    j: int,
    turn: int,
    stage_replicas: IntArray,
    after_at: IntArray,
    after: IntArray,
    after_lane: IntArray,
) -> int:
    """Return the lane of an edge between two replicas, -1 if they exchange nothing."""
    ours, theirs = stage_replicas[a], stage_replicas[b]
    if turn >= 0:
        meets = i == turn % ours and j == turn % theirs
    else:
        meets = i * theirs < (j + 1) * ours and j * ours < (i + 1) * theirs
    lane = -1
    for e in range(after_at[a], after_at[a + 1]):
        if meets and after[e] == b:
            lane = after_lane[e] + i * theirs + j
    return lane


@kernel
def _match(
    op: OpArray, stage: IntArray, microbatch: IntArray, peer: IntArray, replica: IntArray, starts: LongArray,
    slot_rank: IntArray, slot_replica: IntArray, stage_rank: IntArray, stage_replicas: IntArray,
    after_at: IntArray, after: IntArray, after_lane: IntArray,
    total: int, per_batch: int, turns: bool,
    sends: IntArray, receives: IntArray, lane: IntArray, flaw: OpArray,
) -> None:  # fmt: skip
    stages = len(stage_rank)
    for slot in range(len(slot_rank)):
        rank, own = slot_rank[slot], slot_replica[slot]
        for row in range(starts[slot], starts[slot + 1]):
            o = op[row]
            if o < SEND_F or o > RECV_B:
                continue
            s, other, their, k = stage[row], peer[row], replica[row], microbatch[row]
            exists = 0 <= s < stages and 0 <= other < stages and 0 <= k < total
            if (
                not exists
                or stage_rank[s] != rank
                or stage_rank[other] == rank
                or not 0 <= their < stage_replicas[other]
            ):
                flaw[row] = STRAY
                continue
            # The activation runs from `a`, replica i, to `b`, replica j; the gradient the other way over the same lane.
            if o == SEND_F or o == RECV_B:
                a, i, b, j = s, own, other, their
            else:
                a, i, b, j = other, their, s, own
            at = _lane(a, i, b, j, k // per_batch if turns else -1, stage_replicas, after_at, after, after_lane)
            if at < 0:
                flaw[row] = STRAY
                continue
            lane[row] = at
            way = 0 if o == SEND_F or o == RECV_F else 1
            table = sends if o == SEND_F or o == SEND_B else receives
            if table[way, at, k] >= 0:
                flaw[row] = DOUBLED
            table[way, at, k] = row
