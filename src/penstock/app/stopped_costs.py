"""Costs of a simulation from stopwatches.

Methods that have the same stages run the same forwards and backwards, so the median is taken over all their runs: what
else the machine did meanwhile then speeds up none of them. What a method does around them is its own, and so are
updates where it keeps versions; synchronous methods share those too. Transfers take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from penstock.app.stopwatch import Seconds, Stopwatch
from penstock.core.action import Op
from penstock.core.cost import Costs, Footprint
from penstock.core.links import FloatArray, pair_links
from penstock.core.shape import Law, Shape


def stopped_costs(
    shape: Shape, mine: Stopwatch, alike: Sequence[Stopwatch], footprint: Footprint, recompute: bool
) -> Costs:
    """Of a run that `mine` has timed; `alike` are those of all runs with the same stages, itself included.

    A synchronous one's updates are the median over those that keep no versions: which are those without rows `around`.
    """
    forward, whole, split, late = (
        _medians(shape, [watch.own for watch in alike], op) for op in (Op.F, Op.B, Op.I, Op.W)
    )
    flushed = [watch for watch in alike if not watch.around] if shape.law is Law.SYNC else [mine]
    again = np.full(shape.stages, recompute)
    backward = np.where(split > 0, split, whole)
    return Costs(
        forward=forward + _medians(shape, [mine.around], Op.F),
        # Costs count a second forward on top.
        input_grad=np.maximum(backward - np.where(again, forward, 0.0), 0.0) + _medians(shape, [mine.around], Op.B),
        weight_grad=late,
        update=_medians(shape, [watch.own for watch in flushed], Op.UPDATE),
        reduce=np.zeros(shape.stages),
        recompute=again,
        slowdown=np.ones(shape.slots),
        links=pair_links(shape, np.zeros(len(shape.edges))),
        footprint=footprint,
    )


def _medians(shape: Shape, every: Sequence[Seconds], op: Op) -> FloatArray:
    """By stage; 0 where there was no such operation."""
    found = [[second for one in every for second in one.get((op, stage), ())] for stage in range(shape.stages)]
    return np.array([median(seconds) if seconds else 0.0 for seconds in found])
