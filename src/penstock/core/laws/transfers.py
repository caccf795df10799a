"""Law 3: each tensor that crosses slots is sent once and received once (census.py sees that it is in time)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.core.faults import Fault, FaultKind
from penstock.core.laws.evidence import MORE, Evidence
from penstock.core.match import DOUBLED
from penstock.core.schedule import BoolArray


def transfer_faults(e: Evidence) -> Iterator[Fault]:
    for row in np.flatnonzero((e.pairs.flaw > 0) & (e.seen.flaw == 0))[:MORE].tolist():
        if e.pairs.flaw[row] == DOUBLED:
            yield e.fault(FaultKind.DOUBLED, row, "stands here a second time; drop one of the two")
        else:
            yield e.fault(FaultKind.STRAY, row, "no data flows between these two; drop the transfer")
    yield from _without_partner(e)


def _without_partner(e: Evidence) -> Iterator[Fault]:
    shape, pairs, every = e.full.shape, e.pairs, e.full.shape.lanes
    if all(table[:, every.number].min(initial=0) >= 0 for table in (pairs.sends, pairs.receives)):
        return
    columns = (column.tolist() for column in (every.number, every.source, every.target, every.edge))
    for lane, source, target, edge in zip(*columns, strict=True):
        a, b = shape.edges[edge]
        i, j = int(shape.slot_replica[source]), int(shape.slot_replica[target])
        due = _due(e, (a, i), (b, j))
        # The activation goes from a to b, its gradient from b to a.
        for way, letter, (s, r, ours), (o, q, theirs) in (
            (0, "F", (a, i, source), (b, j, target)),
            (1, "B", (b, j, target), (a, i, source)),
        ):
            for k in np.flatnonzero(due & (pairs.sends[way, lane] < 0))[:MORE].tolist():
                yield Fault(FaultKind.PARTNER, ours, -1, f"{s}{letter}{k}>{_end(o, q)} is missing; send it")
            for k in np.flatnonzero(due & (pairs.receives[way, lane] < 0))[:MORE].tolist():
                yield Fault(FaultKind.PARTNER, theirs, -1, f"{o}{letter}{k}<{_end(s, r)} is missing; receive it")


def _end(stage: int, replica: int) -> str:
    return f"{stage}.{replica}" if replica else str(stage)


def _due(e: Evidence, sender: tuple[int, int], receiver: tuple[int, int]) -> BoolArray:
    """The micro-batches that pass between two replicas."""
    shape, (a, i), (b, j) = e.full.shape, sender, receiver
    due = np.ones(shape.total, dtype=np.bool_)
    if shape.turns:
        turn = np.arange(shape.total) // shape.microbatches
        due = (turn % shape.stage_replicas[a] == i) & (turn % shape.stage_replicas[b] == j)
    if e.given.lowered:
        return due
    # Lowering made these transfers, so only a missing action takes one away, and that is reported as such.
    for stage, replica in (sender, receiver):
        share = int(e.seen.first[stage]) + (0 if shape.turns else replica)
        due &= (e.seen.forward[share] >= 0) & (e.seen.backward[share] >= 0)
    return due
