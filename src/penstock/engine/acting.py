"""Running one compute action: the same for all engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from penstock.core.action import Action, Op
from penstock.engine.desk import Desk
from penstock.model.stage import Job, Stage
from penstock.model.walk import watching


def _nobody(stage: int) -> None:
    """Weights are where they are needed."""


class Acting:
    """The stages of one process, what waits for them, and what became of the micro-batches, by their numbers.

    `apart(stage, micro-batch)` says whose input and weight gradients are actions of their own.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        apart: Callable[[int, int], bool],
        turn: Callable[[int], None] = _nobody,
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.apart, self.turn = apart, turn  # the latter is told whose weights are needed next
        self.begin([])

    def begin(self, jobs: Iterable[Job]) -> None:
        self.jobs = {job.number: job for job in jobs}
        self.desk = Desk(self.stages)
        self.made: dict[int, Any] = {}

    def watched(self) -> AbstractContextManager[None]:
        """Around all actions on the jobs: `watching`, which takes as long as a small stage, where a stage needs it."""
        walks = any(stage.split.walks(job.path, at) for job in self.jobs.values() for at, stage in self.stages.items())
        return watching() if walks else nullcontext()

    @property
    def results(self) -> list[Any]:
        """Of all micro-batches with rows, in order; None where this process does not have the last stage."""
        return [self.made.get(number) for number, job in self.jobs.items() if job.rows]

    def act(self, op: Op, stage: int, microbatch: int) -> None:
        job, mine = self.jobs[microbatch], self.stages[stage]
        if not job.rows:
            return
        self.turn(stage)
        if op in (Op.F, Op.FB):
            self.forward(stage, job, self.apart(stage, microbatch))
        elif op in (Op.B, Op.I):
            self.desk.hand_back(job, stage, mine.backward(job, self.desk.take_back(stage, microbatch)))
        else:
            mine.weight_gradient(job)

    def forward(self, stage: int, job: Job, split_backward: bool = False) -> None:
        made, result = self.stages[stage].forward(job, self.desk.take(stage, job.number), split_backward)
        self.desk.hand_on(job, stage, made)
        if result is not None:
            self.made[job.number] = result

    def drop(self) -> None:
        """Forget what an interrupted step has left behind."""
        self.begin([])
        for stage in self.stages.values():
            stage.drop()


def flat(actions: Iterable[Action]) -> list[Action]:
    """Overlapped pairs as two actions."""
    return [part for action in actions for part in (action, action.joined) if part is not None]


def apart_in(actions: Iterable[Action]) -> Callable[[int, int], bool]:
    """Whose input gradient is an action of its own, in a list of actions."""
    split = {(action.stage, action.microbatch) for action in actions if action.op is Op.I}
    return lambda stage, microbatch: (stage, microbatch) in split
