"""From compute actions to the full list: sends, receives, reductions and updates, once, for all methods.

Around each compute action of a slot, in this order:

    receive what it needs from other slots · the action · send what others need of it
    · reduce, when it completed the gradient of a replicated stage · update

A synchronous update waits for the slot's last action of the mini-batch, so that clipping and inf checks see all
gradients; an asynchronous one follows its gradient at once.
"""

from __future__ import annotations

import numpy as np

from penstock.core.action import Op
from penstock.core.jit import helper, kernel
from penstock.core.schedule import Rows, Schedule
from penstock.core.shape import Law

# Kernels see plain integers: a compiled loop cannot look into an enum.
F, B, I, W, FB = int(Op.F), int(Op.B), int(Op.I), int(Op.W), int(Op.FB)
SEND_F, RECV_F, SEND_B, RECV_B = int(Op.SEND_F), int(Op.RECV_F), int(Op.SEND_B), int(Op.RECV_B)
REDUCE, UPDATE = int(Op.REDUCE), int(Op.UPDATE)


def lower(schedule: Schedule) -> Schedule:
    """The same schedule with every transfer, reduction and update in its place."""
    if schedule.lowered:
        return schedule
    shape, rows, near = schedule.shape, schedule.rows, schedule.shape.neighbours()
    rounds = max(shape.rounds(stage) for stage in range(shape.stages))
    out = np.full((6, _longest(schedule)), -1, dtype=np.int32)
    starts = np.zeros(shape.slots + 1, dtype=np.int64)
    _emit(
        len(rows),
        *(rows.op, rows.stage, rows.microbatch, rows.version, schedule.starts),
        *(shape.slot_rank, shape.slot_replica, shape.stage_rank, shape.stage_replicas),
        *(near.after_at, near.after, near.before_at, near.before),
        *(shape.microbatches, shape.batches, rounds, shape.turns, shape.law is Law.SYNC),
        *(out, starts),
    )
    out = out[:, : starts[-1]]
    return Schedule(shape, Rows(out[0].astype(np.uint8), *out[1:]), starts, lowered=True)


def _longest(schedule: Schedule) -> int:
    """An upper bound on the rows that lowering makes."""
    shape, rows = schedule.shape, schedule.rows
    per_stage = np.zeros(shape.stages, dtype=np.int64)
    for a, b in shape.edges:
        if shape.placement[a] != shape.placement[b]:
            per_stage[a] += shape.stage_replicas[b] // shape.stage_replicas[a] + 2
            per_stage[b] += shape.stage_replicas[a] // shape.stage_replicas[b] + 2
    moving = (rows.stage >= 0) & (rows.stage < shape.stages) & (rows.op != W)
    transfers = int(per_stage[rows.stage[moving]].sum())
    updates = sum(int(shape.stage_replicas[stage]) * shape.rounds(stage) for stage in range(shape.stages))
    return len(rows) + transfers + 2 * updates


@helper
def _put(out, at, op, stage, microbatch, version):  # type: ignore[no-untyped-def]
    out[0, at], out[1, at], out[2, at], out[3, at] = op, stage, microbatch, version
    return at + 1


@helper
def _put_transfers(out, at, op, stage, k, others, first, last, own, turn, stage_rank, stage_replicas):  # type: ignore[no-untyped-def]  # fmt: skip
    """One transfer for each replica of each neighbour on another rank that shares rows with replica `own`."""
    for e in range(first, last):
        other = others[e]
        if stage_rank[other] == stage_rank[stage]:
            continue
        theirs, ours = stage_replicas[other], stage_replicas[stage]
        low, high = own * theirs // ours, ((own + 1) * theirs - 1) // ours
        if turn >= 0:
            low, high = turn % theirs, turn % theirs
        for replica in range(low, high + 1):
            out[4, at], out[5, at] = other, replica
            at = _put(out, at, op, stage, k, 0)
    return at


@helper
def _put_round(out, at, stage, made, replicated, update):  # type: ignore[no-untyped-def]
    """Reduction and update that make version `made`."""
    if replicated:
        at = _put(out, at, REDUCE, stage, -1, made)
    if update:
        at = _put(out, at, UPDATE, stage, -1, made)
    return at


@helper
def _mark_ends(op, stage, microbatch, first, last, stage_replicas, per_batch, turns, closing, ending):  # type: ignore[no-untyped-def]  # fmt: skip
    """Find the row that completes each stage's gradient of each round, and the last row of each mini-batch."""
    for row in range(first, last):
        s, batch = stage[row], microbatch[row] // per_batch
        if 0 <= s < len(stage_replicas) and 0 <= batch < len(ending):
            if op[row] == B or op[row] == W:
                closing[s, batch // stage_replicas[s] if turns else batch] = row
            ending[batch] = row


@kernel
def _emit(
    op, stage, microbatch, version, starts,
    slot_rank, slot_replica, stage_rank, stage_replicas,
    after_at, after, before_at, before,
    per_batch, batches, rounds, turns, sync,
    out, out_starts,
):  # type: ignore[no-untyped-def]  # fmt: skip
    stages = len(stage_rank)
    closing = np.full((stages, rounds), -1, dtype=np.int64)
    ending = np.full(batches, -1, dtype=np.int64)
    at = 0
    for slot in range(len(slot_rank)):
        rank, own, row = slot_rank[slot], slot_replica[slot], starts[slot]
        _mark_ends(op, stage, microbatch, row, starts[slot + 1], stage_replicas, per_batch, turns, closing, ending)
        while row < starts[slot + 1]:
            stop = row + 2 if op[row] == FB and row + 1 < starts[slot + 1] else row + 1
            for phase in range(3):  # receives of the row (or overlapped pair), the row itself, its sends
                for r in range(row, stop):
                    s, k = stage[r], microbatch[r]
                    if phase == 1:
                        at = _put(out, at, op[r], s, k, version[r])
                        continue
                    if op[r] == W or not 0 <= s < stages or stage_rank[s] != rank:
                        continue
                    forward = op[r] == F or op[r] == FB
                    turn = k // per_batch if turns else -1
                    if forward == (phase == 0):  # a forward receives from before, a backward sends there
                        kind = RECV_F if phase == 0 else SEND_B
                        first, last, others = before_at[s], before_at[s + 1], before
                    else:
                        kind = RECV_B if phase == 0 else SEND_F
                        first, last, others = after_at[s], after_at[s + 1], after
                    at = _put_transfers(out, at, kind, s, k, others, first, last, own, turn, stage_rank, stage_replicas)  # fmt: skip
            for r in range(row, stop):
                s, batch = stage[r], microbatch[r] // per_batch
                if not (0 <= s < stages and 0 <= batch < batches):
                    continue
                turn = batch // stage_replicas[s] if turns else batch
                if closing[s, turn] == r:
                    at = _put_round(out, at, s, turn + 1, stage_replicas[s] > 1, not sync)
                if sync and ending[batch] == r:
                    for mine in range(stages):
                        if stage_rank[mine] == rank:
                            at = _put(out, at, UPDATE, mine, -1, batch + 1)
            row = stop
        if turns:  # replicas without a mini-batch in the last, partial round take part in its reduction all the same
            for s in range(stages):
                last = (batches - 1) // stage_replicas[s]
                if stage_rank[s] == rank and last * stage_replicas[s] + own >= batches:
                    at = _put_round(out, at, s, last + 1, True, True)
        out_starts[slot + 1] = at
