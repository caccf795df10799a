"""The clock: when every row of a lowered schedule starts and ends.

Slots work through their lists; a worklist holds those that can go on. A send starts its transfer and never holds its
slot up; a receive holds its slot up until the tensor is there; a reduction runs beside the compute and its update waits
for it. Where several slots send over one link, sends are taken in the order (time, slot), so a slot that is about to
send steps back until it is the earliest.
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


def run(proven: Proven, costs: Costs) -> tuple[FloatArray, FloatArray]:
    """Start and end seconds of every row."""
    schedule, pairs, links = proven.schedule, proven.pairs, costs.links
    shape, rows = schedule.shape, schedule.rows
    start, end = np.empty(len(rows)), np.empty(len(rows))
    _clock(
        len(rows),
        *(rows.op, rows.stage, rows.microbatch, rows.peer, rows.replica, schedule.starts),
        *(shape.slot_replica, shape.stage_replicas, shape.first_slot[shape.stage_rank]),
        *(pairs.sends, pairs.receives, pairs.lane),
        *(seconds_table(schedule, costs), costs.slowdown, costs.reduce, costs.overlap),
        *(links.seconds, links.latency, links.leave, links.enter, links.resources, links.shared),
        *(start, end),
    )
    return start, end


def seconds_table(schedule: Schedule, costs: Costs) -> FloatArray:
    """Seconds of every operation on every stage, by (op, stage): a replica's share of the rows, recompute included."""
    share = shares(schedule.shape)
    again = np.where(costs.recompute, costs.forward, 0.0)
    table = np.zeros((len(Op), schedule.shape.stages))
    table[F] = table[FB] = costs.forward * share
    table[B] = (costs.input_grad + costs.weight_grad + again) * share
    table[I] = (costs.input_grad + again) * share
    table[W] = costs.weight_grad * share
    table[UPDATE] = costs.update
    return table


@helper
def _wake(ready: LongArray, height: int, heap: list[tuple[float, int]], shared: bool, time: float, slot: int) -> int:
    """Put a slot among those that can go on; returns the new height of the stack."""
    if shared:
        heapq.heappush(heap, (time, slot))
        return height
    ready[height] = slot
    return height + 1


@kernel
def _clock(
    op: OpArray, stage: IntArray, microbatch: IntArray, peer: IntArray, replica: IntArray, starts: LongArray,
    slot_replica: IntArray, stage_replicas: IntArray, stage_slot: IntArray,
    sends: IntArray, receives: IntArray, lane: IntArray,
    seconds: FloatArray, slowdown: FloatArray, reduce_seconds: FloatArray, overlap: float,
    link_seconds: FloatArray, latency: FloatArray, leave: IntArray, enter: IntArray, resources: int, shared: bool,
    start: FloatArray, end: FloatArray,
) -> None:  # fmt: skip
    slots, stages = len(slot_replica), len(stage_slot)
    at = starts[:-1].copy()  # next row of every slot
    now = np.zeros(slots)
    free = np.zeros(resources + 1)  # when each link is free again; the last one is for "none"
    reducing = np.zeros(slots)  # when each slot's reduction lane is free again
    waiting = np.full((stages, slots), -1, dtype=np.int64)  # row of the reduction each slot has entered
    entered = np.zeros(stages, dtype=np.int64)
    reduced = np.full((stages, slots), -1.0)  # end of the slot's last complete reduction, -1 while one is open
    blocked = np.zeros(slots, dtype=np.bool_)
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
            if o <= W or o == UPDATE:
                if o == UPDATE and stage_replicas[s] > 1:
                    if reduced[s, slot] < 0:
                        blocked[slot] = True
                        break
                    t = max(t, reduced[s, slot])
                start[row] = t
                t += seconds[o, s] * slowdown[slot]
                end[row] = t
            elif o == FB:  # one atomic action over two rows
                start[row] = start[row + 1] = t
                t += (seconds[F, s] + seconds[B, stage[row + 1]]) * slowdown[slot] * overlap
                end[row] = end[row + 1] = t
                row += 1
            elif o == SEND_F or o == SEND_B:
                if shared and t > turn:  # somebody else may send before
                    heapq.heappush(heap, (t, slot))
                    break
                way = 0 if o == SEND_F else 1
                path = lane[row]
                out, into = leave[way, path], enter[way, path]
                begin = t
                if link_seconds[way, path] > 0:
                    begin = max(t, free[out], free[into] if into >= 0 else t)
                    free[out] = begin + link_seconds[way, path]
                    if into >= 0:
                        free[into] = free[out]
                start[row] = begin
                end[row] = begin + link_seconds[way, path] + latency[way, path]
                target = stage_slot[peer[row]] + replica[row]
                if blocked[target] and at[target] == receives[way, path, microbatch[row]]:
                    blocked[target] = False
                    height = _wake(ready, height, heap, shared, max(now[target], end[row]), target)
            elif o == RECV_F or o == RECV_B:
                sent = sends[0 if o == RECV_F else 1, lane[row], microbatch[row]]
                source = stage_slot[peer[row]] + replica[row]
                if sent < 0 or at[source] <= sent:
                    blocked[slot] = True
                    break
                start[row] = t
                t = max(t, end[sent])
                end[row] = t
            elif o == REDUCE:
                start[row] = end[row] = t
                waiting[s, slot] = row
                reduced[s, slot] = -1.0
                entered[s] += 1
                if entered[s] == stage_replicas[s]:
                    entered[s] = 0
                    first = stage_slot[s]
                    begin = t
                    for member in range(first, first + stage_replicas[s]):
                        begin = max(begin, start[waiting[s, member]], reducing[member])
                    for member in range(first, first + stage_replicas[s]):
                        start[waiting[s, member]] = begin
                        end[waiting[s, member]] = begin + reduce_seconds[s]
                        reduced[s, member] = reducing[member] = begin + reduce_seconds[s]
                        if blocked[member] and op[at[member]] == UPDATE and stage[at[member]] == s:
                            blocked[member] = False
                            height = _wake(ready, height, heap, shared, max(now[member], reduced[s, member]), member)
            else:
                start[row] = end[row] = t
            row += 1
            at[slot] = row
        at[slot], now[slot] = row, t
