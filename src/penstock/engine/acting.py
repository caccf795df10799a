"""Running one compute action: the same for both engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.core.action import Action, Op
from penstock.engine.desk import Desk
from penstock.model.stage import Job, Stage


def _nobody(stage: int) -> None:
    """Weights are where they are needed."""


class Acting:
    """The stages of one process, what waits for them, and what became of the micro-batches."""

    def __init__(
        self, stages: Iterable[Stage], actions: Iterable[Action], turn: Callable[[int], None] = _nobody
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.turn = turn  # told whose weights are needed next
        self.split = {(action.stage, action.microbatch) for action in actions if action.op is Op.I}
        self.begin([])

    def begin(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.desk = Desk(self.stages)
        self.results: list[Any] = [None] * len(jobs)

    def act(self, op: Op, stage: int, microbatch: int) -> None:
        job, mine = self.jobs[microbatch], self.stages[stage]
        self.turn(stage)
        if op in (Op.F, Op.FB):
            self.forward(stage, job, (stage, microbatch) in self.split)
        elif op in (Op.B, Op.I):
            self.desk.hand_back(job, stage, mine.backward(job, self.desk.take_back(stage, microbatch)))
        else:
            mine.weight_gradient(job)

    def forward(self, stage: int, job: Job, split_backward: bool = False) -> None:
        made, result = self.stages[stage].forward(job, self.desk.take(stage, job.number), split_backward)
        self.desk.hand_on(job, stage, made)
        if result is not None:
            self.results[job.number] = result

    def drop(self) -> None:
        """Forget what an interrupted step has left behind."""
        self.begin([])
        for stage in self.stages.values():
            stage.drop()


def flat(actions: Iterable[Action]) -> list[Action]:
    """Overlapped pairs as two actions."""
    return [part for action in actions for part in (action, action.joined) if part is not None]
