"""Law 4: weight versions, reductions and updates, row by row.

A slot's list is read in order with what each of its stages has: the newest version, the gradients gathered for the next
one, and whether they have been reduced. By the law of the schedule a forward of micro-batch k (mini-batch b) names

    sync      b, and it is the newest          2bw       max(b - 1, 0), and it is one of the two newest
    stash     the newest                       newest    the newest
    vertical  what the first stage's forward of k named, counted in mini-batches

and a backward names the same as its forward, except under `newest`, where it names the newest of its own moment.
Gradients add up in one place, so those of a round wait for the update of the round before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.core.action import Op
from penstock.core.faults import Fault, FaultKind
from penstock.core.jit import helper, kernel
from penstock.core.laws.census import Census
from penstock.core.laws.evidence import MORE, Evidence
from penstock.core.schedule import LongArray, OpArray, Schedule
from penstock.core.shape import IntArray, Law

F, B, W, FB, REDUCE, UPDATE = (int(op) for op in (Op.F, Op.B, Op.W, Op.FB, Op.REDUCE, Op.UPDATE))
SYNC, STASH, VERTICAL, NEWEST, TWO_BW = range(5)
CODE = {Law.SYNC: SYNC, Law.STASH: STASH, Law.VERTICAL: VERTICAL, Law.NEWEST: NEWEST, Law.TWO_BW: TWO_BW}

NOT_YET, DROPPED, NOT_LAWFUL = 1, 2, 3  # of a version that an action names
OUT_OF_ORDER, INCOMPLETE, UNREDUCED, NEEDLESS = 4, 5, 6, 7  # of an update or reduction
MIXED = 8  # of a gradient that would go into the round before its own


def version_faults(e: Evidence) -> Iterator[Fault]:
    flaw, wanted, newest = _flaws(e.full, e.seen)
    law = e.full.shape.law.value
    if not e.given.lowered:  # lowering puts an update behind its last gradient: only a missing action leaves it short
        flaw[flaw == INCOMPLETE] = 0
    for row in np.flatnonzero(flaw)[:MORE].tolist():
        version, want, update = int(e.full.rows.version[row]), int(wanted[row]), f"{e.full.rows.stage[row]}U"
        said = {
            NOT_YET: f"version {version} does not exist yet; the law {law!r} asks for {want}",
            DROPPED: f"version {version} is already dropped; the law {law!r} asks for {want}",
            NOT_LAWFUL: f"version {version} breaks the law {law!r}, which asks for {want}",
            OUT_OF_ORDER: f"makes version {version} where {want} is next",
            INCOMPLETE: "comes before the gradients it needs are complete; move it behind them",
            UNREDUCED: "the gradients were not reduced over the replicas; reduce them first",
            NEEDLESS: "the stage has one replica; there is nothing to reduce",
            MIXED: f"its gradient would go into version {want}, an earlier round's; move it behind {update}@{want}",
        }[int(flaw[row])]
        yield e.fault(FaultKind.VERSION if flaw[row] <= NOT_LAWFUL else FaultKind.UPDATE, row, said)
    if e.given.lowered or not e.seen.flaw.any():  # lowering drops no update by itself: a stray action does
        yield from _updates_missing(e, newest)


def _updates_missing(e: Evidence, newest: IntArray) -> Iterator[Fault]:
    stages, slots = e.full.shape.seat_places
    have, last = newest, e.full.shape.stage_rounds[stages]
    for seat in np.flatnonzero(have < last).tolist():
        stage = f"{stages[seat]}"
        said = f"stage {stage} ends with version {have[seat]} where {last[seat]} is due; "
        yield Fault(FaultKind.UPDATE, int(slots[seat]), -1, f"{said}{stage}U@{have[seat] + 1} is missing")


def _flaws(schedule: Schedule, seen: Census) -> tuple[OpArray, IntArray, IntArray]:
    """By row: what is wrong, and then the version there should be; by seat: the newest version at the end."""
    shape, rows = schedule.shape, schedule.rows
    flaw, wanted = np.zeros(len(rows), dtype=np.uint8), np.zeros(len(rows), dtype=np.int32)
    newest = np.zeros(int(shape.seats[-1]), dtype=np.int32)
    _read(
        len(rows),
        *(rows.op, rows.stage, rows.microbatch, rows.version, schedule.starts),
        *(shape.slot_replica, shape.stage_replicas, shape.seats, seen.first, seen.forward, seen.flaw),
        *(shape.microbatches, shape.batches, shape.turns, CODE[shape.law]),
        *(flaw, wanted, newest),
    )
    return flaw, wanted, newest


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
    """The version that the law names, or -1 where a missing action leaves it open."""
    if law == SYNC:
        return batch
    if law == TWO_BW:
        return max(batch - 1, 0)
    if law == NEWEST or (is_forward and (law == STASH or s == 0)):
        return newest
    row = forward[0, k] if is_forward else forward[share, k]
    named: int = version[row] if row >= 0 else -1
    if turns and is_forward and row >= 0:  # a version of r replicas holds r mini-batches
        named = named * stage_replicas[0] // stage_replicas[s]
    return named


@kernel
def _read(
    op: OpArray, stage: IntArray, microbatch: IntArray, version: IntArray, starts: LongArray,
    slot_replica: IntArray, stage_replicas: IntArray, seats: IntArray,
    share_first: IntArray, forward: IntArray, row_flaw: OpArray,
    per_batch: int, batches: int, turns: bool, law: int,
    flaw: OpArray, wanted: IntArray, newest: IntArray,
) -> None:  # fmt: skip
    gathered = np.zeros((seats[-1], batches), dtype=np.int32)  # gradients of a round, of every replica of every stage
    reduced = np.zeros(seats[-1], dtype=np.int64)  # version whose gradients have been reduced
    for slot in range(len(slot_replica)):
        own = slot_replica[slot]
        for row in range(starts[slot], starts[slot + 1]):
            o, s, k, v = op[row], stage[row], microbatch[row], version[row]
            if row_flaw[row] != 0:
                continue
            seat = seats[s] + own
            have = newest[seat]
            if o <= FB:
                share = share_first[s] if turns else share_first[s] + own
                batch = k // per_batch
                is_forward = o == F or o == FB
                want = _lawful(law, is_forward, s, k, batch, have, forward, share, version, stage_replicas, turns)
                oldest = have - 1 if law == TWO_BW else have
                if v > have:
                    flaw[row] = NOT_YET
                elif v < oldest and law != STASH and law != VERTICAL:
                    flaw[row] = DROPPED
                elif want >= 0 and v != want:
                    flaw[row] = NOT_LAWFUL
                if flaw[row] != 0:
                    wanted[row] = want
                if o == B or o == W:
                    turn = batch // stage_replicas[s] if turns else batch
                    gathered[seat, turn] += 1
                    if turn > have and flaw[row] == 0:
                        flaw[row], wanted[row] = MIXED, have + 1
            elif o == REDUCE or o == UPDATE:
                wanted[row] = have + 1
                made = v - 1
                due = 0
                if v == have + 1 and made < batches:
                    due = per_batch if not turns or made * stage_replicas[s] + own < batches else 0
                if v != have + 1 or (o == REDUCE and reduced[seat] == v):
                    flaw[row] = OUT_OF_ORDER
                elif o == REDUCE and stage_replicas[s] == 1:
                    flaw[row] = NEEDLESS
                elif made >= batches or gathered[seat, made] < due:
                    flaw[row] = INCOMPLETE
                elif o == UPDATE and stage_replicas[s] > 1 and reduced[seat] != v:
                    flaw[row] = UNREDUCED
                if o == REDUCE:
                    reduced[seat] = v
                elif v == have + 1:
                    newest[seat] = v
