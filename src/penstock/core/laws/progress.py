"""Law 5: every slot reaches the end of its list; and if not, who waits for whom.

Three kinds of transfer. *Buffered*: a send never waits, a receive waits for its own message. *In order*: the same, but
a pair of slots delivers messages in the order they were sent, so receives must stand in that order. *Blocking*: a send
waits until the other slot stands at the matching receive; a sound schedule may rightly fail there.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import numpy as np

from penstock.core.action import Op
from penstock.core.faults import Fault, FaultKind
from penstock.core.jit import kernel
from penstock.core.laws.evidence import MORE, Evidence
from penstock.core.match import Match
from penstock.core.schedule import LongArray, OpArray, Schedule
from penstock.core.shape import IntArray

SEND_F, RECV_F, SEND_B, RECV_B = int(Op.SEND_F), int(Op.RECV_F), int(Op.SEND_B), int(Op.RECV_B)
REDUCE, UPDATE = int(Op.REDUCE), int(Op.UPDATE)


class Transfers(StrEnum):
    BUFFERED = "buffered"
    IN_ORDER = "in-order"
    BLOCKING = "blocking"


def progress_faults(e: Evidence, kind: Transfers) -> Iterator[Fault]:
    full = e.full
    if kind is not Transfers.BUFFERED:
        for row in _overtaken(full, e.pairs)[:MORE].tolist():
            yield e.fault(FaultKind.CHANNEL, row, "stands behind a receive whose message was sent later")
    at = _reach(full, e.pairs, kind is Transfers.BLOCKING)
    for slot in range(full.shape.slots):
        if at[slot] < full.starts[slot + 1]:
            yield e.fault(FaultKind.DEADLOCK, int(at[slot]), f"deadlock: waits for {_awaited(e, int(at[slot]), at)}")


def _awaited(e: Evidence, row: int, at: LongArray) -> str:
    action, shape = e.full.action(row), e.full.shape
    if action.op is Op.UPDATE:
        return f"the other replicas of stage {action.stage} to reduce"
    slot = shape.slot(action.peer, action.replica)
    stuck = e.word(int(at[slot])) if at[slot] < e.full.starts[slot + 1] else "its end"
    return f"rank {int(shape.slot_rank[slot])}, which stands at {stuck}"


def _reach(schedule: Schedule, pairs: Match, blocking: bool) -> LongArray:
    """The row at which each slot gets stuck: the end of its list when it does not."""
    shape, rows = schedule.shape, schedule.rows
    at = schedule.starts[:-1].copy()
    _advance(
        len(rows),
        *(rows.op, rows.stage, rows.microbatch, schedule.starts),
        *(shape.slot_replica, shape.stage_replicas, shape.first_slot[shape.stage_rank], shape.seats),
        *(pairs.sends, pairs.receives, pairs.lane, pairs.target, blocking, at),
    )
    return at


@kernel
def _advance(
    op: OpArray, stage: IntArray, microbatch: IntArray, starts: LongArray,
    slot_replica: IntArray, stage_replicas: IntArray, stage_slot: IntArray, seats: IntArray,
    sends: IntArray, receives: IntArray, lane: IntArray, target: IntArray, blocking: bool, at: LongArray,
) -> None:  # fmt: skip
    slots = len(at)
    entered = np.zeros(len(stage_slot), dtype=np.int64)  # slots of a stage in its open reduction
    is_open = np.zeros(seats[-1], dtype=np.bool_)  # a seat has entered a reduction that is not complete
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
                    at[other] += blocking  # both ends go on together
                    blocked[other] = False
                    ready[height] = other
                    height += 1
            elif o == REDUCE:
                entered[s] += 1
                is_open[seats[s] + slot_replica[slot]] = True
                if entered[s] == stage_replicas[s]:
                    entered[s] = 0
                    for member in range(stage_slot[s], stage_slot[s] + stage_replicas[s]):
                        is_open[seats[s] + slot_replica[member]] = False
                        if blocked[member] and op[at[member]] == UPDATE and stage[at[member]] == s:
                            blocked[member] = False
                            ready[height] = member
                            height += 1
            elif o == UPDATE and is_open[seats[s] + slot_replica[slot]]:
                blocked[slot] = True
                break
            row += 1
        at[slot] = row


def _overtaken(schedule: Schedule, pairs: Match) -> LongArray:
    """Receives that stand before one whose message was sent earlier over the same pair of slots."""
    slot = schedule.slot_of_rows()
    sent, received = pairs.sends.ravel(), pairs.receives.ravel()
    both = (sent >= 0) & (received >= 0)
    sent, received = sent[both], received[both]
    channel = slot[sent].astype(np.int64) * schedule.shape.slots + slot[received]
    by_sending = np.lexsort((sent, channel))
    received, channel = received[by_sending], channel[by_sending]
    early = (np.diff(received) < 0) & (np.diff(channel) == 0)
    return np.sort(received[1:][early])
