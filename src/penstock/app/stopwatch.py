"""Seconds of every stage's operations in an inline run: what a simulation of the same run on many devices is fed with.

Apart from each other are kept the stage's own forward or backward, what a method does around it (choosing and
correcting weights), and updates, also where they happen inside of it.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter

from penstock.app.pipeline import Pipeline
from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow
from penstock.engine.observer import Observer

Seconds = dict[tuple[Op, int], list[float]]  # by operation and stage


class Stopwatch(Observer):
    """Put on a pipeline before its first step."""

    def __init__(self, pipe: Pipeline) -> None:
        self.own: Seconds = defaultdict(list)  # of the stage itself, and of its updates
        self.around: Seconds = defaultdict(list)  # of asynchronous methods
        self.inside = 0.0  # seconds that were noted since a row began
        self.row_begun = self.stage_begun = self.update_begun = 0.0
        self.asynchronous = pipe.async_trainer is not None
        pipe.observers.add(self)

    def before(self, row: ActionRow) -> None:
        self.inside, self.row_begun = 0.0, perf_counter()

    def after(self, row: ActionRow) -> None:
        if self.asynchronous and row.op <= Op.FB:
            self.around[row.op, row.stage].append(perf_counter() - self.row_begun - self.inside)

    def stage_begins(self, row: ActionRow) -> None:
        self.stage_begun = perf_counter()

    def stage_ends(self, row: ActionRow) -> None:
        self._note(Op.F if row.op is Op.FB else row.op, row.stage, perf_counter() - self.stage_begun)

    def update_begins(self, stage: int) -> None:
        self.update_begun = perf_counter()

    def update_ends(self, stage: int) -> None:
        self._note(Op.UPDATE, stage, perf_counter() - self.update_begun)

    def _note(self, op: Op, stage: int, seconds: float) -> None:
        self.own[op, stage].append(seconds)
        self.inside += seconds
