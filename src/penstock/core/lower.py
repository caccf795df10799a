"""Lowering: add sends, receives, reductions and updates to the compute actions of a schedule of any method.

Each compute action of a slot becomes, in this order:

    receives of its inputs · the action · sends of its outputs
    · a reduction, if it completes the gradient of a replicated stage · an update

A synchronous update comes after the slot's last action of the mini-batch, so that clipping and inf checks see all
gradients; an asynchronous one comes right after its gradient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from penstock.core.action import Op
from penstock.core.arguments import named
from penstock.core.jit import helper, kernel
from penstock.core.schedule import BoolArray, LongArray, OpArray, Schedule, ScheduleRows, require_schedule
from penstock.core.shape import IntArray, Law, Shape
from penstock.errors import InputError

# Kernels use plain integers, because compiled code cannot read an enum.
F, B, I, W, FB = int(Op.F), int(Op.B), int(Op.I), int(Op.W), int(Op.FB)
SEND_F, RECV_F, SEND_B, RECV_B = int(Op.SEND_F), int(Op.RECV_F), int(Op.SEND_B), int(Op.RECV_B)
REDUCE, UPDATE = int(Op.REDUCE), int(Op.UPDATE)


class ComputeRows(NamedTuple):
    """Rows of a schedule that is not lowered; slot s has rows starts[s] to starts[s + 1] - 1."""

    op: OpArray
    stage: IntArray
    microbatch: IntArray
    version: IntArray
    starts: LongArray


class ShapeTables(NamedTuple):
    """Ranks, replicas and neighbours: the stages after stage s are after[after_at[s]:after_at[s + 1]]."""

    slot_rank: IntArray
    slot_replica: IntArray
    rank: IntArray  # of every stage
    replicas: IntArray  # how many each stage has
    after_at: IntArray
    after: IntArray
    before_at: IntArray
    before: IntArray


class LoweredRows(NamedTuple):
    """The rows that are written."""

    op: OpArray
    columns: IntArray  # [stage, micro-batch, version, peer, replica]
    starts: LongArray


class Batching(NamedTuple):
    """How micro-batches make mini-batches, and how many updates the mini-batches make."""

    per_batch: int
    batches: int
    updates: int  # the most of a stage
    turns: bool  # replicas take whole mini-batches in turns
    sync: bool


class ShapeBounds(NamedTuple):
    """Upper bounds for schedules of one shape."""

    transfers: LongArray  # of one action, by stage
    stage_updates: int  # of one stage
    updates: int  # in all


class LastRows(NamedTuple):
    """Rows that reductions and updates come after."""

    of_update: LongArray  # (stage, update): the row that completes the gradient
    of_batch: LongArray  # the slot's last row of every mini-batch
    marked: BoolArray  # whether a row is one of these


@named
def lower(schedule: Schedule) -> Schedule:
    """Return the same schedule with its transfers, reductions and updates; a lowered one is returned as it is."""
    require_schedule(schedule)
    if schedule.lowered:
        return schedule
    _require_compute(schedule)
    shape, rows, near = schedule.shape, schedule.rows, schedule.shape.neighbours
    bounds = _bounds(shape)
    longest = _longest(schedule, bounds)
    lowered = LoweredRows(
        np.empty(longest, dtype=np.uint8),
        np.empty((5, longest), dtype=np.int32),
        np.zeros(shape.slots + 1, dtype=np.int64),
    )
    _emit(
        len(rows),
        ComputeRows(rows.op, rows.stage, rows.microbatch, rows.version, schedule.starts),
        ShapeTables(
            *(shape.slot_rank, shape.slot_replica, shape.stage_rank, shape.stage_replicas),
            *(near.after_at, near.after, near.before_at, near.before),
        ),
        Batching(shape.microbatches, shape.batches, bounds.stage_updates, shape.turns, shape.law is Law.SYNC),
        lowered,
    )
    count = lowered.starts[-1]
    return Schedule(shape, ScheduleRows(lowered.op[:count], *lowered.columns[:, :count]), lowered.starts, lowered=True)


def _require_compute(schedule: Schedule) -> None:
    others = np.flatnonzero((schedule.rows.op > FB) & (schedule.rows.op <= UPDATE))
    if len(others):
        raise InputError(
            "compute actions alone in a schedule that is not lowered",
            str(schedule.action(int(others[0]))),
            "drop it, or give the whole list with lowered=True",
        )


def _longest(schedule: Schedule, bounds: ShapeBounds) -> int:
    """Return an upper bound on the rows that lowering makes."""
    shape, rows = schedule.shape, schedule.rows
    moving = (rows.stage >= 0) & (rows.stage < shape.stages) & (rows.op != W)
    return len(rows) + int(bounds.transfers[rows.stage[moving]].sum()) + 2 * bounds.updates


@lru_cache(maxsize=16)
def _bounds(shape: Shape) -> ShapeBounds:
    """Return the numbers that lowering needs of a shape."""
    transfers = np.zeros(shape.stages, dtype=np.int64)
    for a, b in shape.edges:
        if shape.placement[a] != shape.placement[b]:
            ours, theirs = int(shape.stage_replicas[a]), int(shape.stage_replicas[b])
            transfers[a] += 1 if shape.turns else _most_peers(ours, theirs)
            transfers[b] += 1 if shape.turns else _most_peers(theirs, ours)
    return ShapeBounds(transfers, int(shape.stage_updates.max()), int(shape.stage_replicas @ shape.stage_updates))


def _most_peers(ours: int, theirs: int) -> int:
    """Return the most of `theirs` replicas that share rows with one of `ours`."""
    return -(-theirs // ours) + (1 if theirs % ours and ours % theirs else 0)


@helper
def _put(rows: LoweredRows, at: int, op: int, stage: int, k: int, version: int, peer: int, replica: int) -> int:
    """Write one row; returns where the next one goes."""
    columns = rows.columns
    rows.op[at] = op
    columns[0, at], columns[1, at], columns[2, at], columns[3, at], columns[4, at] = stage, k, version, peer, replica
    return at + 1


@helper
def _put_transfers(
    rows: LoweredRows, at: int, shape: ShapeTables, phase: int, forward: bool, s: int, k: int, own: int, turn: int
) -> int:
    """Write the receives (phase 0) or sends (phase 2) of an action: one for each replica of each neighbour on another
    rank that shares rows with replica `own`."""
    if forward == (phase == 0):  # a forward receives from before, a backward sends there
        op = RECV_F if phase == 0 else SEND_B
        first, last, others = shape.before_at[s], shape.before_at[s + 1], shape.before
    else:
        op = RECV_B if phase == 0 else SEND_F
        first, last, others = shape.after_at[s], shape.after_at[s + 1], shape.after
    for place in range(first, last):
        other = others[place]
        if shape.rank[other] == shape.rank[s]:
            continue
        theirs, ours = shape.replicas[other], shape.replicas[s]
        low, high = own, own
        if turn >= 0:
            low, high = turn % theirs, turn % theirs
        elif theirs != ours:
            low, high = own * theirs // ours, ((own + 1) * theirs - 1) // ours
        for replica in range(low, high + 1):
            at = _put(rows, at, op, s, k, 0, other, replica)
    return at


@helper
def _put_update(rows: LoweredRows, at: int, stage: int, version: int, replicated: bool, update: bool) -> int:
    """Write the reduction and the update to `version`."""
    if replicated:
        at = _put(rows, at, REDUCE, stage, -1, version, -1, -1)
    if update:
        at = _put(rows, at, UPDATE, stage, -1, version, -1, -1)
    return at


@helper
def _put_ends(
    rows: LoweredRows,
    at: int,
    given: ComputeRows,
    shape: ShapeTables,
    batching: Batching,
    lasts: LastRows,
    row: int,
    rank: int,
) -> int:
    """Write the reduction and the updates that follow a row."""
    s, batch = given.stage[row], given.microbatch[row] // batching.per_batch
    turn = batch // shape.replicas[s] if batching.turns else batch
    if lasts.of_update[s, turn] == row:
        at = _put_update(rows, at, s, turn + 1, shape.replicas[s] > 1, not batching.sync)
    if batching.sync and lasts.of_batch[batch] == row:
        for other in range(len(shape.rank)):
            if shape.rank[other] == rank:
                at = _put(rows, at, UPDATE, other, -1, batch + 1, -1, -1)
    return at


@helper
def _put_partial_update(rows: LoweredRows, at: int, shape: ShapeTables, batching: Batching, rank: int, own: int) -> int:
    """Let a replica without a mini-batch for the last update still take part in its reduction."""
    for s in range(len(shape.rank)):
        last = (batching.batches - 1) // shape.replicas[s]
        if shape.rank[s] == rank and last * shape.replicas[s] + own >= batching.batches:
            at = _put_update(rows, at, s, last + 1, True, True)
    return at


@helper
def _mark_lasts(
    given: ComputeRows, shape: ShapeTables, batching: Batching, lasts: LastRows, slot: int, rank: int, own: int
) -> None:
    """Mark the row that completes each stage's gradient of each update, and the last row of each mini-batch.

    Rows are read backwards, so that the first such row is the last one in the list. A stray row completes nothing, so
    that no slot makes more updates than `_longest` allows.
    """
    first = given.starts[slot]
    for row in range(given.starts[slot + 1] - 1, first - 1, -1):
        s, batch, op = given.stage[row], given.microbatch[row] // batching.per_batch, given.op[row]
        if 0 <= s < len(shape.replicas) and 0 <= batch < len(lasts.of_batch):
            at_home = shape.rank[s] == rank and (not batching.turns or batch % shape.replicas[s] == own)
            if at_home and (op == B or op == W):
                turn = batch // shape.replicas[s] if batching.turns else batch
                if lasts.of_update[s, turn] < first:
                    lasts.of_update[s, turn] = row
                    lasts.marked[row] = True
            if lasts.of_batch[batch] < first:
                lasts.of_batch[batch] = row
                lasts.marked[row] = True


@kernel
def _emit(given: ComputeRows, shape: ShapeTables, batching: Batching, lowered: LoweredRows) -> None:
    op, stage, microbatch, version, starts = given
    stage_rank, turns, per_batch = shape.rank, batching.turns, batching.per_batch
    of_update = np.full((len(stage_rank), batching.updates), -1, dtype=np.int64)
    marked = np.zeros(len(op), dtype=np.bool_)
    lasts = LastRows(of_update, np.full(batching.batches, -1, dtype=np.int64), marked)
    at = 0
    for slot in range(len(shape.slot_rank)):
        rank, own, row = shape.slot_rank[slot], shape.slot_replica[slot], starts[slot]
        _mark_lasts(given, shape, batching, lasts, slot, rank, own)
        while row < starts[slot + 1]:
            paired = op[row] == FB and row + 1 < starts[slot + 1] and op[row + 1] == B
            stop = row + 2 if paired else row + 1
            for phase in range(3):  # receives of the row (or overlapped pair), the row, its sends
                for r in range(row, stop):
                    o, s, k = op[r], stage[r], microbatch[r]
                    if phase == 1:
                        at = _put(lowered, at, o, s, k, version[r], -1, -1)
                    elif o != W and o <= FB and 0 <= s < len(stage_rank) and stage_rank[s] == rank:
                        turn = k // per_batch if turns else -1
                        at = _put_transfers(lowered, at, shape, phase, o == F or o == FB, s, k, own, turn)
            for r in range(row, stop):
                if marked[r]:
                    at = _put_ends(lowered, at, given, shape, batching, lasts, r, rank)
            row = stop
        if turns:
            at = _put_partial_update(lowered, at, shape, batching, rank, own)
        lowered.starts[slot + 1] = at
