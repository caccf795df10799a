"""Laws 1 and 2: every compute action once, on its rank, and in an order in which data can flow on its slot."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.core.action import Op
from penstock.core.faults import Fault, FaultKind
from penstock.core.laws import census as c
from penstock.core.laws.evidence import MORE, Evidence
from penstock.core.schedule import BoolArray, OpArray
from penstock.core.shape import IntArray


def action_faults(e: Evidence) -> Iterator[Fault]:
    yield from _amiss(e)
    yield from _missing(e)
    yield from _out_of_order(e)


def _amiss(e: Evidence) -> Iterator[Fault]:
    """Rows that are wrong by themselves, or where they stand."""
    shape = e.full.shape
    said = {
        c.NO_STAGE: (FaultKind.STRAY, f"there is no such stage; stages are 0 to {shape.stages - 1}"),
        c.NO_MICROBATCH: (FaultKind.STRAY, f"there is no such micro-batch; they are 0 to {shape.total - 1}"),
        c.DOUBLED: (FaultKind.DOUBLED, "stands here a second time; drop one of the two"),
        c.LONE: (FaultKind.STRAY, "overlaps nothing; an F&B needs the full backward right behind it"),
        c.SENT_EARLY: (FaultKind.ORDER, "is sent before it is made; move the send behind"),
        c.RECEIVED_LATE: (FaultKind.ORDER, "is received after it was used; move the receive ahead"),
    }
    for row in np.flatnonzero(e.seen.flaw)[:MORE].tolist():
        flaw, stage = int(e.seen.flaw[row]), int(e.full.rows.stage[row])
        if flaw == c.ELSEWHERE:
            turns = shape.turns and shape.stage_replicas[stage] > 1
            how = ", whose replicas take mini-batches in turns" if turns else ""
            yield e.fault(FaultKind.STRAY, row, f"stage {stage} belongs to rank {shape.placement[stage]}{how}; move it")
        else:
            yield e.fault(said[flaw][0], row, said[flaw][1])


def _missing(e: Evidence) -> Iterator[Fault]:
    """Actions that no slot runs, and weight gradients that a full backward has made already."""
    seen, shape = e.seen, e.full.shape
    split = _op(e, seen.backward) == Op.I
    if _complete(seen, split):
        return
    absent = {"F": seen.forward < 0, "B": seen.backward < 0, "W": split & (seen.weight < 0)}
    for letter, where in absent.items():
        for share, k in np.argwhere(where)[:MORE].tolist():
            stage = int(np.searchsorted(seen.first, share, side="right")) - 1
            replica = share - int(seen.first[stage])
            if shape.turns:
                replica = k // shape.microbatches % int(shape.stage_replicas[stage])
            yield Fault(FaultKind.MISSING, shape.slot(stage, replica), -1, f"{stage}{letter}{k} is missing; add it")
    needless = (seen.weight >= 0) & (seen.backward >= 0) & ~split
    for row in seen.weight[needless][:MORE].tolist():
        yield e.fault(FaultKind.DOUBLED, row, "a full backward has made this gradient; drop it, or write I for B")


def _complete(seen: c.Census, split: BoolArray) -> bool:
    """Whether every action is there, and a weight gradient where, and only where, the backward is split."""
    there = seen.forward.min() >= 0 and seen.backward.min() >= 0
    return bool(there and np.array_equal(seen.weight >= 0, split))


def _op(e: Evidence, rows: IntArray) -> OpArray:
    """What stands at some rows; an absent row, -1, is no operation."""
    found = e.full.rows.op[rows] if len(e.full) else np.zeros(rows.shape, dtype=np.uint8)
    found[rows < 0] = 255
    return found


def _out_of_order(e: Evidence) -> Iterator[Fault]:
    """What must come before what on one slot."""
    seen, shape = e.seen, e.full.shape
    yield from _late(e, seen.forward, seen.backward, "its forward comes later; run the forward first")
    yield from _late(e, seen.backward, seen.weight, "its input gradient comes later; run that first")
    beside = (_op(e, seen.forward) == Op.FB) & (seen.backward == seen.forward + 1)
    for row in seen.backward[beside][:MORE].tolist():
        yield e.fault(FaultKind.ORDER, row, "overlaps the forward it needs; run the forward first")
    for a, b in shape.edges:
        if shape.placement[a] == shape.placement[b]:
            ours = slice(int(seen.first[a]), int(seen.first[a + 1]))
            theirs = slice(int(seen.first[b]), int(seen.first[b + 1]))
            said = "stage {} on the same rank makes its input later; swap the two"
            yield from _late(e, seen.forward[ours], seen.forward[theirs], said.format(a))
            yield from _late(e, seen.backward[theirs], seen.backward[ours], said.format(b))


def _late(e: Evidence, before: IntArray, after: IntArray, message: str) -> Iterator[Fault]:
    late = (before >= 0) & (after >= 0) & (after < before)
    for row in after[late][:MORE].tolist():
        yield e.fault(FaultKind.ORDER, row, message)
