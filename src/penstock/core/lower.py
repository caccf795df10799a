"""Lowering: add sends, receives, reductions and updates to the compute actions of a schedule of any method.

Each compute action of a slot becomes, in this order:

    receives of its inputs · the action · sends of its outputs
    · a reduction, if it completes the gradient of a replicated stage · an update

A synchronous update comes after the slot's last action of the mini-batch, so that clipping and inf checks see all
gradients; an asynchronous one comes right after its gradient.
"""

from __future__ import annotations

import numpy as np

from penstock.core.action import Op
from penstock.core.arguments import named
from penstock.core.jit import helper, kernel
from penstock.core.schedule import BoolArray, LongArray, OpArray, Schedule, ScheduleRows, require_schedule
from penstock.core.shape import IntArray, Law
from penstock.errors import InputError

# Kernels use plain integers, because compiled code cannot read an enum.
F, B, I, W, FB = int(Op.F), int(Op.B), int(Op.I), int(Op.W), int(Op.FB)
SEND_F, RECV_F, SEND_B, RECV_B = int(Op.SEND_F), int(Op.RECV_F), int(Op.SEND_B), int(Op.RECV_B)
REDUCE, UPDATE = int(Op.REDUCE), int(Op.UPDATE)


@named
def lower(schedule: Schedule) -> Schedule:
    """Return the same schedule with its transfers, reductions and updates; a lowered one is returned as it is."""
    require_schedule(schedule)
    if schedule.lowered:
        return schedule
    _require_compute(schedule)
    shape, rows, near = schedule.shape, schedule.rows, schedule.shape.neighbours
    updates = int(shape.stage_updates.max())
    longest = _longest(schedule)
    ops, out = np.empty(longest, dtype=np.uint8), np.empty((5, longest), dtype=np.int32)
    starts = np.zeros(shape.slots + 1, dtype=np.int64)
    _emit(
        len(rows),
        *(rows.op, rows.stage, rows.microbatch, rows.version, schedule.starts),
        *(shape.slot_rank, shape.slot_replica, shape.stage_rank, shape.stage_replicas),
        *(near.after_at, near.after, near.before_at, near.before),
        *(shape.microbatches, shape.batches, updates, shape.turns, shape.law is Law.SYNC),
        *(ops, out, starts),
    )
    count = starts[-1]
    return Schedule(shape, ScheduleRows(ops[:count], *out[:, :count]), starts, lowered=True)


def _require_compute(schedule: Schedule) -> None:
    others = np.flatnonzero((schedule.rows.op > FB) & (schedule.rows.op <= UPDATE))
    if len(others):
        raise InputError(
            "compute actions alone in a schedule that is not lowered",
            str(schedule.action(int(others[0]))),
            "drop it, or give the whole list with lowered=True",
        )


def _longest(schedule: Schedule) -> int:
    """Return an upper bound on the number of rows of the lowered schedule."""
    shape, rows = schedule.shape, schedule.rows
    per_stage = np.zeros(shape.stages, dtype=np.int64)
    for a, b in shape.edges:
        if shape.placement[a] != shape.placement[b]:
            ours, theirs = int(shape.stage_replicas[a]), int(shape.stage_replicas[b])
            per_stage[a] += 1 if shape.turns else _most_peers(ours, theirs)
            per_stage[b] += 1 if shape.turns else _most_peers(theirs, ours)
    moving = (rows.stage >= 0) & (rows.stage < shape.stages) & (rows.op != W)
    transfers = int(per_stage[rows.stage[moving]].sum())
    updates = int(shape.stage_replicas @ shape.stage_updates)
    return len(rows) + transfers + 2 * updates


def _most_peers(ours: int, theirs: int) -> int:
    """Return the most of `theirs` replicas that share rows with one of `ours`."""
    return -(-theirs // ours) + (1 if theirs % ours and ours % theirs else 0)


@helper
def _put(
    ops: OpArray, out: IntArray, at: int, op: int, stage: int, microbatch: int, version: int, peer: int, replica: int
) -> int:
    ops[at] = op
    out[0, at], out[1, at], out[2, at], out[3, at], out[4, at] = stage, microbatch, version, peer, replica
    return at + 1


@helper
def _put_transfers(
    ops: OpArray,
    out: IntArray,
    at: int,
    op: int,
    stage: int,
    k: int,
    others: IntArray,
    first: int,
    last: int,
    own: int,
    turn: int,
    stage_rank: IntArray,
    stage_replicas: IntArray,
) -> int:
    """Write one transfer for each replica of each neighbour on another rank that shares rows with replica `own`."""
    for e in range(first, last):
        other = others[e]
        if stage_rank[other] == stage_rank[stage]:
            continue
        theirs, ours = stage_replicas[other], stage_replicas[stage]
        low, high = own, own
        if turn >= 0:
            low, high = turn % theirs, turn % theirs
        elif theirs != ours:
            low, high = own * theirs // ours, ((own + 1) * theirs - 1) // ours
        for replica in range(low, high + 1):
            at = _put(ops, out, at, op, stage, k, 0, other, replica)
    return at


@helper
def _put_update(ops: OpArray, out: IntArray, at: int, stage: int, version: int, replicated: bool, update: bool) -> int:
    """Write the reduction and the update to `version`."""
    if replicated:
        at = _put(ops, out, at, REDUCE, stage, -1, version, -1, -1)
    if update:
        at = _put(ops, out, at, UPDATE, stage, -1, version, -1, -1)
    return at


@helper
def _mark_ends(
    op: OpArray,
    stage: IntArray,
    microbatch: IntArray,
    first: int,
    last: int,
    rank: int,
    own: int,
    stage_rank: IntArray,
    stage_replicas: IntArray,
    per_batch: int,
    turns: bool,
    closing: LongArray,
    ending: LongArray,
    ends: BoolArray,
) -> None:
    """Mark in `ends` the row that completes each stage's gradient of each update, and the last row of each mini-batch.

    Rows are read backwards, so that the first such row is the last one in the list. A stray row completes nothing, so
    that no slot makes more updates than `_longest` allows.
    """
    for row in range(last - 1, first - 1, -1):
        s, batch = stage[row], microbatch[row] // per_batch
        if 0 <= s < len(stage_replicas) and 0 <= batch < len(ending):
            at_home = stage_rank[s] == rank and (not turns or batch % stage_replicas[s] == own)
            if at_home and (op[row] == B or op[row] == W):
                turn = batch // stage_replicas[s] if turns else batch
                if closing[s, turn] < first:
                    closing[s, turn] = row
                    ends[row] = True
            if ending[batch] < first:
                ending[batch] = row
                ends[row] = True


@kernel
def _emit(
    op: OpArray, stage: IntArray, microbatch: IntArray, version: IntArray, starts: LongArray,
    slot_rank: IntArray, slot_replica: IntArray, stage_rank: IntArray, stage_replicas: IntArray,
    after_at: IntArray, after: IntArray, before_at: IntArray, before: IntArray,
    per_batch: int, batches: int, updates: int, turns: bool, sync: bool,
    ops: OpArray, out: IntArray, out_starts: LongArray,
) -> None:  # fmt: skip
    stages = len(stage_rank)
    closing = np.full((stages, updates), -1, dtype=np.int64)
    ending = np.full(batches, -1, dtype=np.int64)
    ends = np.zeros(len(op), dtype=np.bool_)
    at = 0
    for slot in range(len(slot_rank)):
        rank, own, row = slot_rank[slot], slot_replica[slot], starts[slot]
        _mark_ends(
            op, stage, microbatch, row, starts[slot + 1], rank, own, stage_rank, stage_replicas,
            per_batch, turns, closing, ending, ends,
        )  # fmt: skip
        while row < starts[slot + 1]:
            paired = op[row] == FB and row + 1 < starts[slot + 1] and op[row + 1] == B
            stop = row + 2 if paired else row + 1
            for phase in range(3):  # receives of the row (or overlapped pair), the row, its sends
                for r in range(row, stop):
                    s, k = stage[r], microbatch[r]
                    if phase == 1:
                        at = _put(ops, out, at, op[r], s, k, version[r], -1, -1)
                        continue
                    if op[r] == W or op[r] > FB or not 0 <= s < stages or stage_rank[s] != rank:
                        continue
                    forward = op[r] == F or op[r] == FB
                    turn = k // per_batch if turns else -1
                    if forward == (phase == 0):  # a forward receives from before, a backward sends there
                        kind = RECV_F if phase == 0 else SEND_B
                        first, last, others = before_at[s], before_at[s + 1], before
                    else:
                        kind = RECV_B if phase == 0 else SEND_F
                        first, last, others = after_at[s], after_at[s + 1], after
                    at = _put_transfers(
                        ops, out, at, kind, s, k, others, first, last, own, turn, stage_rank, stage_replicas
                    )
            for r in range(row, stop):
                if not ends[r]:
                    continue
                s, batch = stage[r], microbatch[r] // per_batch
                turn = batch // stage_replicas[s] if turns else batch
                if closing[s, turn] == r:
                    at = _put_update(ops, out, at, s, turn + 1, stage_replicas[s] > 1, not sync)
                if sync and ending[batch] == r:
                    for own_stage in range(stages):
                        if stage_rank[own_stage] == rank:
                            at = _put(ops, out, at, UPDATE, own_stage, -1, batch + 1, -1, -1)
            row = stop
        if turns:  # replicas without a mini-batch for the last update still take part in its reduction
            for s in range(stages):
                last = (batches - 1) // stage_replicas[s]
                if stage_rank[s] == rank and last * stage_replicas[s] + own >= batches:
                    at = _put_update(ops, out, at, s, last + 1, True, True)
        out_starts[slot + 1] = at
