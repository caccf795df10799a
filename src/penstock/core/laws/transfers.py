"""Law 3: each tensor between slots is sent once and received once (actions.py checks the order with its use)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.core.faults import Fault, FaultKind
from penstock.core.laws.context import MOST_FAULTS, CheckContext
from penstock.core.match import DOUBLED
from penstock.core.schedule import BoolArray


def transfer_faults(context: CheckContext) -> Iterator[Fault]:
    for row in np.flatnonzero((context.pairs.flaw > 0) & (context.index.flaw == 0))[:MOST_FAULTS].tolist():
        if context.pairs.flaw[row] == DOUBLED:
            yield context.fault(FaultKind.DOUBLED, row, "occurs a second time; remove one of the two")
        else:
            yield context.fault(FaultKind.STRAY, row, "these two exchange no data; remove the transfer")
    yield from _without_partner(context)


def _without_partner(context: CheckContext) -> Iterator[Fault]:
    shape, pairs, lanes = context.full.shape, context.pairs, context.full.shape.lanes
    if all(table[:, lanes.number].min(initial=0) >= 0 for table in (pairs.sends, pairs.receives)):
        return
    columns = (column.tolist() for column in (lanes.number, lanes.source, lanes.target, lanes.edge))
    for lane, source, target, edge in zip(*columns, strict=True):
        a, b = shape.edges[edge]
        i, j = int(shape.slot_replica[source]), int(shape.slot_replica[target])
        due = _due(context, (a, i), (b, j))
        # The activation goes from a to b, its gradient from b to a.
        for way, letter, (s, r, ours), (o, q, theirs) in (
            (0, "F", (a, i, source), (b, j, target)),
            (1, "B", (b, j, target), (a, i, source)),
        ):
            for k in np.flatnonzero(due & (pairs.sends[way, lane] < 0))[:MOST_FAULTS].tolist():
                yield Fault(FaultKind.PARTNER, ours, -1, f"{s}{letter}{k}>{_end(o, q)} is missing; send it")
            for k in np.flatnonzero(due & (pairs.receives[way, lane] < 0))[:MOST_FAULTS].tolist():
                yield Fault(FaultKind.PARTNER, theirs, -1, f"{o}{letter}{k}<{_end(s, r)} is missing; receive it")


def _end(stage: int, replica: int) -> str:
    return f"{stage}.{replica}" if replica else str(stage)


def _due(context: CheckContext, sender: tuple[int, int], receiver: tuple[int, int]) -> BoolArray:
    """Return the mask of micro-batches that two replicas exchange."""
    shape, (a, i), (b, j) = context.full.shape, sender, receiver
    due = np.ones(shape.total, dtype=np.bool_)
    if shape.turns:
        turn = np.arange(shape.total) // shape.microbatches
        due = (turn % shape.stage_replicas[a] == i) & (turn % shape.stage_replicas[b] == j)
    if context.schedule.lowered:
        return due
    # Lowering adds these transfers: one is missing only where an action is, which is reported itself.
    for stage, replica in (sender, receiver):
        share = int(context.index.first[stage]) + (0 if shape.turns else replica)
        due &= (context.index.forward[share] >= 0) & (context.index.backward[share] >= 0)
    return due
