"""The clock: when every row of a lowered schedule starts and ends.

Slots work through their lists; a worklist holds those that can go on. A send starts its transfer and holds its slot up
only where the slot makes the copy itself; a receive holds its slot up until the tensor is there; a reduction runs
beside the compute and its update waits for it. Where several slots send over one link, sends are taken in the order
(time, slot), so a slot that is about to send steps back until it is the earliest.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from penstock.core.action import Op
from penstock.core.check import Proven
from penstock.core.cost import Costs, shares
from penstock.core.jit import helper, kernel
from penstock.core.links import FloatArray
from penstock.core.schedule import LongArray, OpArray, Schedule
from penstock.core.shape import IntArray

F, B, I, W, FB = int(Op.F), int(Op.B), int(Op.I), int(Op.W), int(Op.FB)
SEND_F, RECV_F, SEND_B, RECV_B = int(Op.SEND_F), int(Op.RECV_F), int(Op.SEND_B), int(Op.RECV_B)
REDUCE, UPDATE = int(Op.REDUCE), int(Op.UPDATE)
OPS, COMPUTE = len(Op), (Op.F, Op.B, Op.I, Op.W)
NOTHING, REDUCTION = -1, -2  # what a slot can wait for, besides a row: REDUCTION - stage
OPEN = -1.0  # the end of a transfer or reduction that is not known yet


class TimedRows(NamedTuple):
    """Rows of a lowered schedule, slot by slot, and the seconds at which they start and end."""

    op: OpArray
    stage: IntArray
    microbatch: IntArray
    starts: LongArray  # slot s has rows starts[s] to starts[s + 1] - 1
    start: FloatArray
    end: FloatArray


class ReplicaTables(NamedTuple):
    """Replicas of the stages, numbered through: those of stage s are first[s] to first[s + 1] - 1."""

    first: IntArray
    slot: IntArray  # of every replica
    of_slot: IntArray  # number of the slot's replica in its stages


class TransferTables(NamedTuple):
    """The rows that send, and the links that carry what they send; way 0 is forward, 1 backward."""

    sends: IntArray  # (way, lane, micro-batch): the row
    lane: IntArray  # of every transfer row
    target: IntArray  # (way, lane), as all below: the slot that receives
    seconds: FloatArray  # that a transfer occupies its links
    latency: FloatArray
    held: FloatArray  # seconds that the sending slot is held up
    leave: IntArray  # the link on the sender's side; -1 is none
    enter: IntArray


class Durations(NamedTuple):
    """Seconds of all that is no transfer."""

    table: FloatArray  # (op, stage)
    slowdown: FloatArray  # of every slot
    factors: FloatArray  # of every row's compute
    reduction: FloatArray  # of every stage
    overlap: float  # of an overlapped pair, as a share of its two parts


class Progress(NamedTuple):
    """How far slots, links and reductions have come."""

    now: FloatArray  # seconds that each slot has reached
    awaits: LongArray  # the send that a blocked slot waits for; REDUCTION - stage for a reduction
    ready: LongArray  # a stack of slots that can go on
    height: LongArray  # of the stack, as its only entry
    since: FloatArray  # when each slot that is ready can go on
    link_free: FloatArray  # when each link is free again; the last entry stands for no link
    entered: LongArray  # replicas in the open reduction of a stage
    reduce_row: LongArray  # row of each replica's last reduction
    reduced: FloatArray  # end of each replica's last reduction, OPEN while one is open
    reduce_free: FloatArray  # end of a slot's last reduction: they run one after the other


def run(proven: Proven, costs: Costs, factors: FloatArray | None = None) -> tuple[FloatArray, FloatArray]:
    """Return start and end seconds of every row; the end of a row that a deadlock keeps out of reach stays below 0.

    The seconds of each row's compute are multiplied with `factors`.
    """
    schedule, pairs, links = proven.schedule, proven.pairs, costs.links
    shape, rows = schedule.shape, schedule.rows
    count = len(rows)
    start, end = np.empty(count), np.full(count, -1.0)  # an end below 0: not reached yet
    if factors is None:
        factors = np.ones(count)
    _clock(
        count,
        TimedRows(rows.op, rows.stage, rows.microbatch, schedule.starts, start, end),
        ReplicaTables(shape.replica_start, shape.replica_places[1], shape.slot_replica),
        TransferTables(
            pairs.sends,
            pairs.lane,
            pairs.target,
            links.seconds,
            links.latency,
            links.held,
            links.leave,
            links.enter,
        ),
        Durations(seconds_table(schedule, costs), costs.slowdown, factors, costs.reduce, costs.overlap),
        links.resources,
        links.shared,
    )
    return start, end


def seconds_table(schedule: Schedule, costs: Costs) -> FloatArray:
    """Return the seconds of every operation on every stage, by (op, stage): a replica's share of the rows."""
    share = shares(schedule.shape)
    table = np.zeros((OPS, len(share)))
    for row, op in enumerate(COMPUTE):
        np.multiply(costs.seconds(op), share, out=table[row])
    table[FB] = table[F]
    table[UPDATE] = costs.update
    return table


@helper
def _wake(progress: Progress, slot: int, time: float) -> None:
    """Put a slot that can go on from some time on the stack."""
    progress.ready[progress.height[0]] = slot
    progress.since[slot] = time
    progress.height[0] += 1


@helper
def _release(progress: Progress, slot: int, reason: int, time: float) -> None:
    """Wake a slot if this is what it waits for."""
    if progress.awaits[slot] == reason:
        progress.awaits[slot] = NOTHING
        _wake(progress, slot, max(progress.now[slot], time))


@helper
def _occupy(free: FloatArray, leave: int, enter: int, t: float, seconds: float) -> float:
    """Take a transfer's links as soon as they are free; returns when that is."""
    if seconds <= 0:
        return t
    # `enter` is -1 where only one link is taken: that is the spare entry, which stays 0.
    begin: float = max(t, free[leave], free[enter])
    free[leave] = begin + seconds
    if enter >= 0:
        free[enter] = begin + seconds
    return begin


@helper
def _send(rows: TimedRows, transfers: TransferTables, progress: Progress, row: int, t: float) -> float:
    """Start a transfer and wake its receiver; returns when the slot that sends goes on."""
    way, lane = 0 if rows.op[row] == SEND_F else 1, transfers.lane[row]
    seconds, held = transfers.seconds[way, lane], transfers.held[way, lane]
    begin = _occupy(progress.link_free, transfers.leave[way, lane], transfers.enter[way, lane], t, seconds)
    arrival = begin + seconds + transfers.latency[way, lane]
    rows.start[row], rows.end[row] = begin, arrival
    _release(progress, transfers.target[way, lane], row, arrival)
    return begin + held if held > 0 else t


@helper
def _receive(rows: TimedRows, transfers: TransferTables, progress: Progress, row: int, slot: int, t: float) -> float:
    """Take a tensor that has been sent; returns when it is there, or OPEN where the slot must wait for the send."""
    sent = transfers.sends[0 if rows.op[row] == RECV_F else 1, transfers.lane[row], rows.microbatch[row]]
    arrival = rows.end[sent]
    if arrival < 0:
        progress.awaits[slot] = sent
        return OPEN
    rows.start[row] = t
    t = max(t, arrival)
    rows.end[row] = t
    return t


@helper
def _overlap(rows: TimedRows, durations: Durations, row: int, slot: int, t: float) -> float:
    """Run an overlapped pair, one atomic action over two rows; returns its end."""
    table, factors = durations.table, durations.factors
    both = table[F, rows.stage[row]] * factors[row] + table[B, rows.stage[row + 1]] * factors[row + 1]
    rows.start[row] = rows.start[row + 1] = t
    t += both * durations.slowdown[slot] * durations.overlap
    rows.end[row] = rows.end[row + 1] = t
    return t


@helper
def _enter_reduction(
    rows: TimedRows, replicas: ReplicaTables, progress: Progress, row: int, slot: int, t: float
) -> bool:
    """Let a replica enter the reduction of its stage; returns whether it is the last one."""
    stage = rows.stage[row]
    replica = replicas.first[stage] + replicas.of_slot[slot]
    rows.start[row] = max(t, progress.reduce_free[slot])
    progress.reduce_row[replica], progress.reduced[replica] = row, OPEN
    progress.entered[stage] += 1
    return bool(progress.entered[stage] == replicas.first[stage + 1] - replicas.first[stage])


@helper
def _reduce(rows: TimedRows, replicas: ReplicaTables, progress: Progress, stage: int, seconds: float) -> None:
    """Run the reduction that all replicas of a stage have entered, and wake those that wait for it."""
    progress.entered[stage] = 0
    first, last = replicas.first[stage], replicas.first[stage + 1]
    begin = 0.0
    for replica in range(first, last):
        begin = max(begin, rows.start[progress.reduce_row[replica]])
    for replica in range(first, last):
        row, slot = progress.reduce_row[replica], replicas.slot[replica]
        rows.start[row], rows.end[row] = begin, begin + seconds
        progress.reduced[replica] = progress.reduce_free[slot] = begin + seconds
        _release(progress, slot, REDUCTION - stage, begin + seconds)


@helper
def _update(
    rows: TimedRows, replicas: ReplicaTables, durations: Durations, progress: Progress, row: int, slot: int, t: float
) -> float:
    """Update a stage when its reduction is complete; returns the end, or OPEN where the slot must wait for that."""
    stage = rows.stage[row]
    reduced = progress.reduced[replicas.first[stage] + replicas.of_slot[slot]]
    if reduced == OPEN:
        progress.awaits[slot] = REDUCTION - stage
        return OPEN
    t = max(t, reduced)
    rows.start[row] = t
    t += durations.table[UPDATE, stage] * durations.slowdown[slot]
    rows.end[row] = t
    return t


@kernel
def _clock(
    rows: TimedRows,
    replicas: ReplicaTables,
    transfers: TransferTables,
    durations: Durations,
    resources: int,
    shared: bool,
) -> None:
    op, stage, _, starts, start, end = rows
    table, slowdown, factors, reduction, _ = durations
    slots, stages, members = len(replicas.of_slot), len(replicas.first) - 1, len(replicas.slot)
    at, now = starts[:-1].copy(), np.zeros(slots)  # `at`: next row of every slot
    ready, height, since = np.arange(slots), np.full(1, slots), np.zeros(slots)
    progress = Progress(
        *(now, np.full(slots, NOTHING), ready, height, since, np.zeros(resources + 1)),
        *(np.zeros(stages, dtype=np.int64), np.zeros(members, dtype=np.int64), np.zeros(members), np.zeros(slots)),
    )
    by_time = [(0.0, ready[0]) for _ in range(0)]  # where links are shared: ready slots as a heap
    turn = 0.0
    while height[0] > 0 or len(by_time) > 0:
        if shared:
            for place in range(height[0]):
                heapq.heappush(by_time, (since[ready[place]], ready[place]))
            height[0] = 0
            turn, slot = heapq.heappop(by_time)
        else:
            height[0] -= 1
            slot = ready[height[0]]
        row, last, t = at[slot], starts[slot + 1], now[slot]
        while row < last:
            o, s = op[row], stage[row]
            if o <= W:
                start[row] = t
                t += table[o, s] * slowdown[slot] * factors[row]
                end[row] = t
            elif o == SEND_F or o == SEND_B:
                if shared and t > turn:  # somebody else may send before
                    _wake(progress, slot, t)
                    break
                t = _send(rows, transfers, progress, row, t)
            elif o == RECV_F or o == RECV_B:
                done = _receive(rows, transfers, progress, row, slot, t)
                if done == OPEN:
                    break
                t = done
            elif o == FB:
                t = _overlap(rows, durations, row, slot, t)
                row += 1
            elif o == REDUCE:
                if _enter_reduction(rows, replicas, progress, row, slot, t):
                    _reduce(rows, replicas, progress, s, reduction[s])
            elif o == UPDATE:
                done = _update(rows, replicas, durations, progress, row, slot, t)
                if done == OPEN:
                    break
                t = done
            else:
                start[row] = end[row] = t
            row += 1
        at[slot], now[slot] = row, t
