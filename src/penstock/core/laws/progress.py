"""Law 5: every slot reaches the end of its list. A fault reports who waits for whom.

There are three kinds of transfer. *Buffered*: a send never waits, a receive waits for its own message. *In order*: the
same, but messages between two slots arrive in the order they were sent, so receives must have that order. *Blocking*: a
send waits until the other slot has reached the matching receive; a sound schedule may fail with these.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import numpy as np

from penstock.core.action import Op
from penstock.core.faults import Fault, FaultKind
from penstock.core.jit import kernel
from penstock.core.laws.context import MOST_FAULTS, CheckContext
from penstock.core.match import Match
from penstock.core.schedule import LongArray, OpArray, Schedule
from penstock.core.shape import IntArray

SEND_F, RECV_F, SEND_B, RECV_B = int(Op.SEND_F), int(Op.RECV_F), int(Op.SEND_B), int(Op.RECV_B)
REDUCE, UPDATE = int(Op.REDUCE), int(Op.UPDATE)


class TransferKind(StrEnum):
    BUFFERED = "buffered"
    IN_ORDER = "in-order"
    BLOCKING = "blocking"


def progress_faults(context: CheckContext, kind: TransferKind) -> Iterator[Fault]:
    full = context.full
    if kind is not TransferKind.BUFFERED:
        for row in _overtaken(full, context.pairs)[:MOST_FAULTS].tolist():
            yield context.fault(FaultKind.CHANNEL, row, "comes after a receive whose message was sent later")
    at = _reach(full, context.pairs, kind is TransferKind.BLOCKING)
    for slot in range(full.shape.slots):
        if at[slot] < full.starts[slot + 1]:
            awaited = _awaited(context, int(at[slot]), at)
            yield context.fault(FaultKind.DEADLOCK, int(at[slot]), f"deadlock: waits for {awaited}")


def _awaited(context: CheckContext, row: int, at: LongArray) -> str:
    action, shape = context.full.action(row), context.full.shape
    if action.op is Op.UPDATE:
        return f"the other replicas of stage {action.stage} to reduce"
    slot = shape.slot(action.peer, action.replica)
    stuck = context.word(int(at[slot])) if at[slot] < context.full.starts[slot + 1] else "its end"
    return f"rank {int(shape.slot_rank[slot])}, which is at {stuck}"


def _reach(schedule: Schedule, pairs: Match, blocking: bool) -> LongArray:
    """Return the row at which each slot waits forever, or the end of its list if it does not."""
    shape, rows = schedule.shape, schedule.rows
    at = schedule.starts[:-1].copy()
    _advance(
        len(rows),
        *(rows.op, rows.stage, rows.microbatch, schedule.starts),
        *(shape.slot_replica, shape.stage_replicas, shape.first_slot[shape.stage_rank], shape.replica_start),
        *(pairs.sends, pairs.receives, pairs.lane, pairs.target, blocking, at),
    )
    return at


@kernel
def _advance(
    op: OpArray, stage: IntArray, microbatch: IntArray, starts: LongArray,
    slot_replica: IntArray, stage_replicas: IntArray, stage_slot: IntArray, replica_start: IntArray,
    sends: IntArray, receives: IntArray, lane: IntArray, target: IntArray, blocking: bool, at: LongArray,
) -> None:  # fmt: skip
    slots = len(at)
    entered = np.zeros(len(stage_slot), dtype=np.int64)  # slots of a stage in its open reduction
    is_open = np.zeros(replica_start[-1], dtype=np.bool_)  # replicas of stages in a reduction that is not complete
    ready = np.arange(slots)  # a stack; a slot is on it, running, or blocked
    height = slots
    blocked = np.zeros(slots, dtype=np.bool_)
    while height > 0:
        height -= 1
        slot = ready[height]
        row = at[slot]
        while row < starts[slot + 1]:
            o, s = op[row], stage[row]
            if SEND_F <= o <= RECV_B:
                sending = o == SEND_F or o == SEND_B
                way = 0 if o == SEND_F or o == RECV_F else 1
                other_row = (receives if sending else sends)[way, lane[row], microbatch[row]]
                other = target[way if sending else 1 - way, lane[row]]
                meets = blocked[other] and at[other] == other_row
                if (blocking and not meets) or (not blocking and not sending and at[other] <= other_row):
                    blocked[slot] = True
                    break
                if meets:
                    at[other] += blocking  # both ends continue
                    blocked[other] = False
                    ready[height] = other
                    height += 1
            elif o == REDUCE:
                entered[s] += 1
                is_open[replica_start[s] + slot_replica[slot]] = True
                if entered[s] == stage_replicas[s]:
                    entered[s] = 0
                    for member in range(stage_slot[s], stage_slot[s] + stage_replicas[s]):
                        is_open[replica_start[s] + slot_replica[member]] = False
                        if blocked[member] and op[at[member]] == UPDATE and stage[at[member]] == s:
                            blocked[member] = False
                            ready[height] = member
                            height += 1
            elif o == UPDATE and is_open[replica_start[s] + slot_replica[slot]]:
                blocked[slot] = True
                break
            row += 1
        at[slot] = row


def _overtaken(schedule: Schedule, pairs: Match) -> LongArray:
    """Return receives after a receive whose message was sent later between the same two slots."""
    slot = schedule.slot_of_rows()
    sent, received = pairs.sends.ravel(), pairs.receives.ravel()
    both = (sent >= 0) & (received >= 0)
    sent, received = sent[both], received[both]
    channel = slot[sent].astype(np.int64) * schedule.shape.slots + slot[received]
    by_sending = np.lexsort((sent, channel))
    received, channel = received[by_sending], channel[by_sending]
    early = (np.diff(received) < 0) & (np.diff(channel) == 0)
    return np.sort(received[1:][early])
