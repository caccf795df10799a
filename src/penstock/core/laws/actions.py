"""Laws 1 and 2: every compute action runs once, on its rank, and after the actions it depends on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.core.action import Op
from penstock.core.faults import Fault, FaultKind
from penstock.core.laws import action_index
from penstock.core.laws.context import MOST_FAULTS, CheckContext
from penstock.core.schedule import BoolArray, OpArray
from penstock.core.shape import IntArray


def action_faults(context: CheckContext) -> Iterator[Fault]:
    yield from _wrong_rows(context)
    yield from _missing(context)
    yield from _out_of_order(context)


def _wrong_rows(context: CheckContext) -> Iterator[Fault]:
    """Yield rows that are wrong by themselves, or at their position."""
    shape = context.full.shape
    messages = {
        action_index.NO_STAGE: (FaultKind.STRAY, f"there is no such stage; stages are 0 to {shape.stages - 1}"),
        action_index.NO_MICROBATCH: (FaultKind.STRAY, f"there is no such micro-batch; they are 0 to {shape.total - 1}"),
        action_index.DOUBLED: (FaultKind.DOUBLED, "occurs a second time; remove one of the two"),
        action_index.LONE: (FaultKind.STRAY, "overlaps nothing; an F&B needs the full backward right after it"),
        action_index.SENT_EARLY: (FaultKind.ORDER, "is sent before it is computed; move the send after its action"),
        action_index.RECEIVED_LATE: (
            FaultKind.ORDER,
            "is received after it was used; move the receive before its action",
        ),
    }
    for row in np.flatnonzero(context.index.flaw)[:MOST_FAULTS].tolist():
        flaw, stage = int(context.index.flaw[row]), int(context.full.rows.stage[row])
        if flaw == action_index.ELSEWHERE:
            turns = shape.turns and shape.stage_replicas[stage] > 1
            place = f"rank {shape.placement[stage]}" + (", whose replicas take mini-batches in turns" if turns else "")
            yield context.fault(FaultKind.STRAY, row, f"stage {stage} belongs to {place}; move it")
        else:
            yield context.fault(messages[flaw][0], row, messages[flaw][1])


def _missing(context: CheckContext) -> Iterator[Fault]:
    """Yield actions that no slot runs, and weight gradients that a full backward has computed already."""
    index, shape = context.index, context.full.shape
    split = _op(context, index.backward) == Op.I
    if _complete(index, split):
        return
    absent = {"F": index.forward < 0, "B": index.backward < 0, "W": split & (index.weight < 0)}
    for letter, where in absent.items():
        for share, k in np.argwhere(where)[:MOST_FAULTS].tolist():
            stage = int(np.searchsorted(index.first, share, side="right")) - 1
            replica = share - int(index.first[stage])
            if shape.turns:
                replica = k // shape.microbatches % int(shape.stage_replicas[stage])
            yield Fault(FaultKind.MISSING, shape.slot(stage, replica), -1, f"{stage}{letter}{k} is missing; add it")
    needless = (index.weight >= 0) & (index.backward >= 0) & ~split
    for row in index.weight[needless][:MOST_FAULTS].tolist():
        yield context.fault(
            FaultKind.DOUBLED, row, "a full backward computes this gradient; remove it, or write I for B"
        )


def _complete(index: action_index.ActionIndex, split: BoolArray) -> bool:
    """Return True if no action is missing, and weight gradients exist exactly where the backward is split."""
    there = index.forward.min() >= 0 and index.backward.min() >= 0
    return bool(there and np.array_equal(index.weight >= 0, split))


def _op(context: CheckContext, rows: IntArray) -> OpArray:
    """Return the operations of some rows, 255 for an absent row, -1."""
    ops = context.full.rows.op[rows] if len(context.full) else np.zeros(rows.shape, dtype=np.uint8)
    ops[rows < 0] = 255
    return ops


def _out_of_order(context: CheckContext) -> Iterator[Fault]:
    """Yield actions of one slot that run before an action they depend on."""
    index, shape = context.index, context.full.shape
    yield from _late(context, index.forward, index.backward, "its forward comes later; run the forward first")
    yield from _late(context, index.backward, index.weight, "its input gradient comes later; run that first")
    beside = (_op(context, index.forward) == Op.FB) & (index.backward == index.forward + 1)
    for row in index.backward[beside][:MOST_FAULTS].tolist():
        yield context.fault(FaultKind.ORDER, row, "overlaps the forward it needs; run the forward first")
    for a, b in shape.edges:
        if shape.placement[a] == shape.placement[b]:
            ours = slice(int(index.first[a]), int(index.first[a + 1]))
            theirs = slice(int(index.first[b]), int(index.first[b + 1]))
            message = "stage {} on the same rank computes its input later; swap the two"
            yield from _late(context, index.forward[ours], index.forward[theirs], message.format(a))
            yield from _late(context, index.backward[theirs], index.backward[ours], message.format(b))


def _late(context: CheckContext, before: IntArray, after: IntArray, message: str) -> Iterator[Fault]:
    late = (before >= 0) & (after >= 0) & (after < before)
    for row in after[late][:MOST_FAULTS].tolist():
        yield context.fault(FaultKind.ORDER, row, message)
