"""Seconds of every stage's operations in an inline run, and the costs of a simulation from them.

An observer times the rows. Methods with the same stages run the same forwards and backwards, so the median over all
their runs is taken: other load on the machine then matters little.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from time import perf_counter

import numpy as np

from penstock.core.action import Op
from penstock.core.cost import Costs, Footprint, shares
from penstock.core.links import FloatArray, pair_links
from penstock.core.lowered_loop import ActionRow
from penstock.core.shape import Law, Shape
from penstock.engine.observer import Observer
from penstock.training.pipeline import Pipeline

Seconds = dict[tuple[Op, int], list[float]]  # by operation and stage


class Stopwatch(Observer):
    """An observer that times rows, added to a pipeline before its first step."""

    def __init__(self, pipe: Pipeline) -> None:
        self.own: Seconds = defaultdict(list)  # seconds of the stage itself, and of its updates
        self.overhead: Seconds = defaultdict(list)  # other seconds of a row, in asynchronous methods
        self.inside = 0.0  # seconds recorded since the row began
        self.row_begun = self.stage_begun = self.update_begun = 0.0
        self.asynchronous = pipe.async_trainer is not None
        pipe.observers.add(self)

    def before(self, row: ActionRow) -> None:
        self.inside, self.row_begun = 0.0, perf_counter()

    def after(self, row: ActionRow) -> None:
        if self.asynchronous and row.op <= Op.FB:
            self.overhead[row.op, row.stage].append(perf_counter() - self.row_begun - self.inside)

    def stage_begins(self, row: ActionRow) -> None:
        self.stage_begun = perf_counter()

    def stage_ends(self, row: ActionRow) -> None:
        self._record(Op.F if row.op is Op.FB else row.op, row.stage, perf_counter() - self.stage_begun)

    def update_begins(self, stage: int) -> None:
        self.update_begun = perf_counter()

    def update_ends(self, stage: int) -> None:
        self._record(Op.UPDATE, stage, perf_counter() - self.update_begun)

    def _record(self, op: Op, stage: int, seconds: float) -> None:
        self.own[op, stage].append(seconds)
        self.inside += seconds


def measured_costs(
    shape: Shape, own: Stopwatch, alike: Sequence[Stopwatch], footprint: Footprint, recompute: bool
) -> Costs:
    """Return the costs of a run timed by `own`. `alike` are the stopwatches of all runs with the same stages, its own
    included. A replica's rows take its share of a micro-batch's seconds.

    The update of a synchronous run is the median over the runs without versions, which are those without `overhead`.
    """
    every = 1.0 / shares(shape)
    forward, whole, split, late = (
        every * _medians(shape, [watch.own for watch in alike], op) for op in (Op.F, Op.B, Op.I, Op.W)
    )
    flushed = [watch for watch in alike if not watch.overhead] if shape.law is Law.SYNC else [own]
    again = np.full(shape.stages, recompute)
    backward = np.where(split > 0, split, whole)
    return Costs(
        forward=forward + _medians(shape, [own.overhead], Op.F),
        # The simulator adds the second forward itself.
        input_grad=np.maximum(backward - np.where(again, forward, 0.0), 0.0) + _medians(shape, [own.overhead], Op.B),
        weight_grad=late,
        update=_medians(shape, [watch.own for watch in flushed], Op.UPDATE),
        reduce=np.zeros(shape.stages),
        recompute=again,
        slowdown=np.ones(shape.slots),
        links=pair_links(shape, np.zeros(len(shape.edges))),
        footprint=footprint,
    )


def _medians(shape: Shape, every: Sequence[Seconds], op: Op) -> FloatArray:
    """Return the median by stage; 0 where there was no such operation."""
    seconds_of_stages = [
        [second for one in every for second in one.get((op, stage), ())] for stage in range(shape.stages)
    ]
    return np.array([median(seconds) if seconds else 0.0 for seconds in seconds_of_stages])
