"""The clock: when every row of a lowered schedule starts and ends.

Slots work through their lists; a worklist holds those that can go on. A send starts its transfer and holds its slot up
only where the slot makes the copy itself; a receive holds its slot up until the tensor is there; a reduction runs
beside the compute and its update waits for it. Where several slots send over one link, sends are taken in the order
(time, slot), so a slot that is about to send steps back until it is the earliest.
"""

from __future__ import annotations

import heapq

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
NOTHING, REDUCTION = -1, -2  # what a slot can wait for, besides a row: REDUCTION - stage
OPEN = -1.0  # the end of a reduction that is not complete


def run(proven: Proven, costs: Costs, factors: FloatArray | None = None) -> tuple[FloatArray, FloatArray]:
    """Start and end seconds of every row; the end of a row that a deadlock keeps out of reach stays below 0.

    `factors`: what the seconds of each row's compute are multiplied with.
    """
    schedule, pairs, links = proven.schedule, proven.pairs, costs.links
    shape, rows = schedule.shape, schedule.rows
    start, end = np.empty(len(rows)), np.full(len(rows), -1.0)  # an end below 0: not reached yet
    _clock(
        len(rows),
        *(rows.op, rows.stage, rows.microbatch, schedule.starts),
        *(shape.slot_replica, shape.stage_replicas, shape.first_slot[shape.stage_rank], shape.replica_start),
        *(pairs.sends, pairs.lane, pairs.target),
        *(seconds_table(schedule, costs), costs.slowdown, costs.reduce, costs.overlap),
        *(links.seconds, links.latency, links.held, links.leave, links.enter, links.resources, links.shared),
        *(np.ones(len(rows)) if factors is None else factors, start, end),
    )
    return start, end


def seconds_table(schedule: Schedule, costs: Costs) -> FloatArray:
    """Seconds of every operation on every stage, by (op, stage): a replica's share of the rows."""
    share = shares(schedule.shape)
    table = np.zeros((len(Op), schedule.shape.stages))
    for op in (Op.F, Op.B, Op.I, Op.W):
        table[op] = costs.seconds(op) * share
    table[FB] = table[F]
    table[UPDATE] = costs.update
    return table


@helper
def _wake(ready: LongArray, height: int, heap: list[tuple[float, int]], shared: bool, time: float, slot: int) -> int:
    """Put a slot among those that can go on; returns the new height of the stack."""
    if shared:
        heapq.heappush(heap, (time, np.int64(slot)))  # type: ignore[misc]
        return height
    ready[height] = slot
    return height + 1


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
def _gather(first: int, last: int, rows: LongArray, start: FloatArray, end: FloatArray, seconds: float) -> float:
    """The last replica has come: run the reduction of replica_start `first` to `last`; returns its end."""
    begin = 0.0
    for seat in range(first, last):
        begin = max(begin, start[rows[seat]])
    for seat in range(first, last):
        start[rows[seat]], end[rows[seat]] = begin, begin + seconds
    return begin + seconds


@kernel
def _clock(
    op: OpArray, stage: IntArray, microbatch: IntArray, starts: LongArray,
    slot_replica: IntArray, stage_replicas: IntArray, stage_slot: IntArray, replica_start: IntArray,
    sends: IntArray, lane: IntArray, target: IntArray,
    seconds: FloatArray, slowdown: FloatArray, reduce_seconds: FloatArray, overlap: float,
    link_seconds: FloatArray, latency: FloatArray, held: FloatArray, leave: IntArray, enter: IntArray, resources: int,
    shared: bool,
    factors: FloatArray, start: FloatArray, end: FloatArray,
) -> None:  # fmt: skip
    slots, stages = len(slot_replica), len(stage_slot)
    at = starts[:-1].copy()  # next row of every slot
    now = np.zeros(slots)
    awaits = np.full(slots, NOTHING)  # the send a blocked slot waits for; REDUCTION - stage for a reduction
    free = np.zeros(resources + 1)  # when each link is free again; the last entry stands for no link
    entered = np.zeros(stages, dtype=np.int64)  # replicas in the open reduction of a stage
    reduce_row = np.zeros(replica_start[-1], dtype=np.int64)
    reduced = np.zeros(replica_start[-1])  # end of a seat's last reduction, OPEN while one is open
    lanes_free = np.zeros(slots)  # reductions of one slot run one after the other
    ready = np.arange(slots)  # a stack of slots that can go on; where links are shared, a heap of (time, slot) instead
    height = 0 if shared else slots
    heap = [(0.0, slot) for slot in range(slots)]
    while height > 0 or (shared and len(heap) > 0):
        if shared:
            turn, slot = heapq.heappop(heap)
        else:
            height -= 1
            turn, slot = 0.0, ready[height]
        row, last, t = at[slot], starts[slot + 1], now[slot]
        while row < last:
            o, s = op[row], stage[row]
            if o <= W:
                start[row] = t
                t += seconds[o, s] * slowdown[slot] * factors[row]
                end[row] = t
            elif o == SEND_F or o == SEND_B:
                if shared and t > turn:  # somebody else may send before
                    heapq.heappush(heap, (t, slot))
                    break
                way = 0 if o == SEND_F else 1
                path = lane[row]
                begin = _occupy(free, leave[way, path], enter[way, path], t, link_seconds[way, path])
                start[row] = begin
                arrival = begin + link_seconds[way, path] + latency[way, path]
                end[row] = arrival
                if held[way, path] > 0:
                    t = begin + held[way, path]
                other = target[way, path]
                if awaits[other] == row:
                    awaits[other] = NOTHING
                    height = _wake(ready, height, heap, shared, max(now[other], arrival), other)
            elif o == RECV_F or o == RECV_B:
                sent = sends[0 if o == RECV_F else 1, lane[row], microbatch[row]]
                if end[sent] < 0:
                    awaits[slot] = sent
                    break
                start[row] = t
                t = max(t, end[sent])
                end[row] = t
            elif o == FB:  # one atomic action over two rows
                start[row] = start[row + 1] = t
                both = seconds[F, s] * factors[row] + seconds[B, stage[row + 1]] * factors[row + 1]
                t += both * slowdown[slot] * overlap
                end[row] = end[row + 1] = t
                row += 1
            elif o == UPDATE:
                seat = replica_start[s] + slot_replica[slot]
                if reduced[seat] == OPEN:
                    awaits[slot] = REDUCTION - s
                    break
                t = max(t, reduced[seat])
                start[row] = t
                t += seconds[o, s] * slowdown[slot]
                end[row] = t
            elif o == REDUCE:
                seat = replica_start[s] + slot_replica[slot]
                start[row] = max(t, lanes_free[slot])
                reduce_row[seat] = row
                reduced[seat] = OPEN
                entered[s] += 1
                if entered[s] == stage_replicas[s]:
                    entered[s] = 0
                    done = _gather(replica_start[s], replica_start[s + 1], reduce_row, start, end, reduce_seconds[s])
                    for member in range(stage_slot[s], stage_slot[s] + stage_replicas[s]):
                        reduced[replica_start[s] + slot_replica[member]] = lanes_free[member] = done
                        if awaits[member] == REDUCTION - s:
                            awaits[member] = NOTHING
                            height = _wake(ready, height, heap, shared, max(now[member], done), member)
            else:
                start[row] = end[row] = t
            row += 1
        at[slot], now[slot] = row, t
