"""Law 4: weight versions, reductions and updates, row by row.

A slot's list is read in order, with the state of each of its stages: the newest version, the gradients gathered for the
next one, and whether they have been reduced. According to the law, a forward of micro-batch k (mini-batch b) names

    sync      b, and it is the newest          2bw       max(b - 1, 0), and it is one of the two newest
    stash     the newest                       newest    the newest
    vertical  what the first stage's forward of k named, counted in mini-batches

and a backward names the same as its forward, except under `newest`, where it names the newest at its own position.
Gradients are summed in one buffer, so those for an update come after the update before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.core.action import Op
from penstock.core.faults import Fault, FaultKind
from penstock.core.jit import helper, kernel
from penstock.core.laws.action_index import ActionIndex
from penstock.core.laws.context import MOST_FAULTS, CheckContext
from penstock.core.schedule import LongArray, OpArray, Schedule
from penstock.core.shape import IntArray, Law

F, B, W, FB, REDUCE, UPDATE = (int(op) for op in (Op.F, Op.B, Op.W, Op.FB, Op.REDUCE, Op.UPDATE))
SYNC, STASH, VERTICAL, NEWEST, TWO_BW = range(5)
CODE = {Law.SYNC: SYNC, Law.STASH: STASH, Law.VERTICAL: VERTICAL, Law.NEWEST: NEWEST, Law.TWO_BW: TWO_BW}

NOT_YET, DROPPED, NOT_LAWFUL = 1, 2, 3  # faults of a version that an action names
OUT_OF_ORDER, INCOMPLETE, UNREDUCED, NEEDLESS = 4, 5, 6, 7  # faults of an update or reduction
MIXED = 8  # fault of a gradient that would be used by the update before its own


def version_faults(context: CheckContext) -> Iterator[Fault]:
    flaw, expected, newest = _flaws(context.full, context.index)
    law, rows = context.full.shape.law.value, context.full.rows
    if not context.schedule.lowered:  # lowering puts updates after their gradients: those incomplete lack an action
        flaw[flaw == INCOMPLETE] = 0
    for row in np.flatnonzero(flaw)[:MOST_FAULTS].tolist():
        version, due, update = int(rows.version[row]), int(expected[row]), f"{rows.stage[row]}U"
        message = {
            NOT_YET: f"version {version} does not exist yet; the law {law!r} asks for {due}",
            DROPPED: f"version {version} is already dropped; the law {law!r} asks for {due}",
            NOT_LAWFUL: f"version {version} breaks the law {law!r}, which asks for {due}",
            OUT_OF_ORDER: f"makes version {version} where {due} is next",
            INCOMPLETE: "comes before the gradients it needs are complete; move it after them",
            UNREDUCED: "the gradients were not reduced over the replicas; reduce them first",
            NEEDLESS: "the stage has one replica; there is nothing to reduce",
            MIXED: f"its gradient would go into version {due}, that of an earlier update; move it after {update}@{due}",
        }[int(flaw[row])]
        yield context.fault(FaultKind.VERSION if flaw[row] <= NOT_LAWFUL else FaultKind.UPDATE, row, message)
    if context.schedule.lowered or not context.index.flaw.any():  # lowering omits none unless there is a stray action
        yield from _updates_missing(context, newest)


def _updates_missing(context: CheckContext, newest: IntArray) -> Iterator[Fault]:
    stages, slots = context.full.shape.replica_places
    last = context.full.shape.stage_updates[stages]
    for at in np.flatnonzero(newest < last).tolist():
        ending = f"stage {stages[at]} ends with version {newest[at]} where {last[at]} is due"
        message = f"{ending}; {stages[at]}U@{newest[at] + 1} is missing"
        yield Fault(FaultKind.UPDATE, int(slots[at]), -1, message)


def _flaws(schedule: Schedule, index: ActionIndex) -> tuple[OpArray, IntArray, IntArray]:
    """Return the fault of each row and the version due there, and the newest version of each replica at the end."""
    shape, rows = schedule.shape, schedule.rows
    flaw, expected = np.zeros(len(rows), dtype=np.uint8), np.zeros(len(rows), dtype=np.int32)
    newest = np.zeros(int(shape.replica_start[-1]), dtype=np.int32)
    _read(
        len(rows),
        *(rows.op, rows.stage, rows.microbatch, rows.version, schedule.starts),
        *(shape.slot_replica, shape.stage_replicas, shape.replica_start, index.first, index.forward, index.flaw),
        *(shape.microbatches, shape.batches, shape.turns, CODE[shape.law]),
        *(flaw, expected, newest),
    )
    return flaw, expected, newest


@helper
def _lawful(
    law: int,
    is_forward: bool,
    s: int,
    k: int,
    batch: int,
    newest: int,
    forward: IntArray,
    share: int,
    version: IntArray,
    stage_replicas: IntArray,
    turns: bool,
) -> int:
    """Return the version that the law names, or -1 if it depends on a missing action."""
    if law == SYNC:
        return batch
    if law == TWO_BW:
        return max(batch - 1, 0)
    if law == NEWEST or (is_forward and (law == STASH or s == 0)):
        return newest
    row = forward[0, k] if is_forward else forward[share, k]
    named: int = version[row] if row >= 0 else -1
    if turns and is_forward and row >= 0:  # an update over r replicas uses r mini-batches
        named = named * stage_replicas[0] // stage_replicas[s]
    return named


@kernel
def _read(
    op: OpArray, stage: IntArray, microbatch: IntArray, version: IntArray, starts: LongArray,
    slot_replica: IntArray, stage_replicas: IntArray, replica_start: IntArray,
    share_first: IntArray, forward: IntArray, row_flaw: OpArray,
    per_batch: int, batches: int, turns: bool, law: int,
    flaw: OpArray, expected: IntArray, newest: IntArray,
) -> None:  # fmt: skip
    gathered = np.zeros((replica_start[-1], batches), dtype=np.int32)  # gradients by (replica of a stage, update)
    reduced = np.zeros(replica_start[-1], dtype=np.int64)  # last version whose gradients have been reduced
    for slot in range(len(slot_replica)):
        own = slot_replica[slot]
        for row in range(starts[slot], starts[slot + 1]):
            o, s, k, v = op[row], stage[row], microbatch[row], version[row]
            if row_flaw[row] != 0:
                continue
            replica = replica_start[s] + own
            have = newest[replica]
            if o <= FB:
                share = share_first[s] if turns else share_first[s] + own
                batch = k // per_batch
                is_forward = o == F or o == FB
                due = _lawful(law, is_forward, s, k, batch, have, forward, share, version, stage_replicas, turns)
                oldest = have - 1 if law == TWO_BW else have
                if v > have:
                    flaw[row] = NOT_YET
                elif v < oldest and law != STASH and law != VERTICAL:
                    flaw[row] = DROPPED
                elif due >= 0 and v != due:
                    flaw[row] = NOT_LAWFUL
                if flaw[row] != 0:
                    expected[row] = due
                if o == B or o == W:
                    turn = batch // stage_replicas[s] if turns else batch
                    gathered[replica, turn] += 1
                    if turn > have and flaw[row] == 0:
                        flaw[row], expected[row] = MIXED, have + 1
            elif o == REDUCE or o == UPDATE:
                expected[row] = have + 1
                update = v - 1
                required = 0
                if v == have + 1 and update < batches:
                    required = per_batch if not turns or update * stage_replicas[s] + own < batches else 0
                if v != have + 1 or (o == REDUCE and reduced[replica] == v):
                    flaw[row] = OUT_OF_ORDER
                elif o == REDUCE and stage_replicas[s] == 1:
                    flaw[row] = NEEDLESS
                elif update >= batches or gathered[replica, update] < required:
                    flaw[row] = INCOMPLETE
                elif o == UPDATE and stage_replicas[s] > 1 and reduced[replica] != v:
                    flaw[row] = UNREDUCED
                if o == REDUCE:
                    reduced[replica] = v
                elif v == have + 1:
                    newest[replica] = v
