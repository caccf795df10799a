"""Run compute actions on the stages of one process: take a stage's inputs, run it, keep its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from penstock.core.action import Op
from penstock.engine.activations import ActivationStore
from penstock.model.loss import Total, total_of
from penstock.model.stage import Job, Stage


class LossSource(Protocol):
    """The source of the loss when another process runs the last stage."""

    def loss(self) -> Total:
        """Return the loss of the mini-batch."""


class StageExecutor:
    """The stages of one process, their activation store, and the results of micro-batches by their numbers.

    `is_split(stage, micro-batch)` returns whether input and weight gradient are separate actions.
    """

    def __init__(self, stages: Iterable[Stage], is_split: Callable[[int, int], bool]) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.is_split = is_split
        self.begin([])

    def begin(self, jobs: Iterable[Job]) -> None:
        """Start a run over some micro-batches; discard everything of an earlier run."""
        self.jobs = {job.number: job for job in jobs}
        self.store = ActivationStore(self.stages)
        self.results: dict[int, Any] = {}

    def add(self, jobs: Iterable[Job]) -> None:
        """Add the micro-batches of a mini-batch to the current run."""
        for job in jobs:
            self.jobs[job.number] = job

    def remove(self, jobs: Iterable[Job]) -> None:
        """Remove micro-batches that are done on all stages of this process."""
        for job in jobs:
            del self.jobs[job.number]
            self.results.pop(job.number, None)

    def watched(self) -> AbstractContextManager[None]:
        """Return the context for a run over these jobs, in which calls come to walks where a stage makes any."""
        jobs, stages = self.jobs.values(), self.stages.items()
        walking = (stage.split for job in jobs for at, stage in stages if stage.split.walks(job.path, at))
        split = next(walking, None)
        return nullcontext() if split is None else split.watched()

    @property
    def ordered_results(self) -> list[Any]:
        """Results of all micro-batches with rows, in order; None where another process has the last stage."""
        return [self.results.get(number) for number, job in self.jobs.items() if job.rows]

    def total(self, source: LossSource) -> Total:
        """Return the loss of the mini-batch: from its results here, or from the process that has them."""
        results = self.ordered_results
        return total_of(results) if results[0] is not None else source.loss()

    def run(self, op: Op, stage: int, microbatch: int) -> None:
        """Run one compute action. A micro-batch without rows computes nothing."""
        job, runner = self.jobs[microbatch], self.stages[stage]
        if not job.rows:
            return
        if op in (Op.F, Op.FB):
            received = self.store.take_values(stage, microbatch)
            outputs, result = runner.forward(job, received, self.is_split(stage, microbatch))
            self.store.put_outputs(job, stage, outputs)
            if result is not None:
                self.results[microbatch] = result
        elif op in (Op.B, Op.I):
            gradients = runner.backward(job, self.store.take_gradients(stage, microbatch))
            self.store.put_input_gradients(job, stage, gradients)
        else:
            runner.weight_gradient(job)

    def drop(self) -> None:
        """Discard the state of an interrupted run."""
        self.begin([])
        for stage in self.stages.values():
            stage.drop()


def never_split(stage: int, microbatch: int) -> bool:
    """Return False: all backwards are full ones."""
    return False
