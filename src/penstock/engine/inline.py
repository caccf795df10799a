"""All slots in one process, in dependency order: deterministic, and a breakpoint stops where you think it does.

Transfers cost nothing here: a value is handed on as it is, and dropped when its last reader has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.core.action import Action, Op
from penstock.core.check import Proven
from penstock.core.schedule import LongArray
from penstock.engine.acting import Acting, apart_in, flat
from penstock.engine.clock import Clock
from penstock.engine.order import dependency_order
from penstock.model.loss import Total, total_of
from penstock.model.stage import Job, Stage


class InlineEngine:
    """Runs one mini-batch of a synchronous schedule over stages in this process. `turn` is told who runs next."""

    def __init__(
        self,
        proven: Proven,
        stages: list[Stage],
        turn: Callable[[int], None] = lambda stage: None,
        clock: Clock | None = None,
    ) -> None:
        order = dependency_order(proven)
        self.order = [action for action in flat(action for _, action in order) if action.op <= Op.FB]
        self.before, self.after = _readings(proven, order)
        self.acting, self.clock = Acting(stages, apart_in(self.order), turn), clock

    def run(self, jobs: list[Job]) -> Total:
        """Forward and backward of all micro-batches; gradients are in the parameters. Returns the loss of all."""
        self.acting.begin(jobs)
        clock = self.clock
        with self.acting.watched():
            if clock is not None:
                clock.begin()
            for action in self.order:
                self.acting.act(action.op, action.stage, action.microbatch)
                if clock is not None:
                    clock.tick()
        return total_of(self.acting.results)

    def forward(self, jobs: list[Job]) -> list[Any]:
        """Forwards alone."""
        return forward_all(self.acting, jobs)

    def close(self) -> None:
        """Nothing is held here that others wait for."""

    def drop(self) -> None:
        """Forget what an interrupted step has left behind."""
        self.acting.drop()


def _readings(proven: Proven, order: list[tuple[int, Action]]) -> tuple[LongArray, LongArray]:
    """By row of the schedule, the numbers of the clock's readings before and after it; one that moves or updates, which
    nobody runs here, has no length."""
    before, after = (np.zeros(len(proven.schedule), dtype=np.int64) for _ in range(2))
    at, read = proven.schedule.starts[:-1].copy(), 0
    for slot, action in order:
        for part in flat([action]):
            row, at[slot] = at[slot], at[slot] + 1
            before[row] = read
            read += part.op <= Op.FB
            after[row] = read
    return before, after


def forward_all(acting: Acting, jobs: list[Job]) -> list[Any]:
    """Forwards alone, one micro-batch after the other, where all stages are at hand."""
    acting.begin(jobs)
    with acting.watched():
        for job in jobs:
            for stage in acting.stages:
                acting.turn(stage)
                acting.forward(stage, job)
    return acting.results
