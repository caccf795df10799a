"""All slots in one process, in dependency order: deterministic, and a breakpoint stops where you think it does.

Transfers cost nothing here: a value is handed on as it is, and dropped when its last reader has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from penstock.core.action import Action, Op
from penstock.core.check import Proven
from penstock.engine.order import dependency_order
from penstock.model.stage import Job, Stage, Values
from penstock.model.walk import watching


class InlineEngine:
    """Runs one mini-batch of a synchronous schedule over stages in this process. `turn` is told who runs next."""

    def __init__(self, proven: Proven, stages: list[Stage], turn: Callable[[int], None] = lambda stage: None) -> None:
        self.stages, self.turn = stages, turn
        order = (action for _, action in dependency_order(proven))
        self.order: list[Action] = [
            part for action in order if action.op <= Op.FB for part in (action, action.joined) if part is not None
        ]
        self.split = {(a.stage, a.microbatch) for a in self.order if a.op is Op.I}

    def run(self, jobs: list[Job]) -> list[Any]:
        """Forward and backward of all micro-batches; gradients are in the parameters. Returns what the jobs made."""
        carrier = _Carrier(jobs)
        results: list[Any] = [None] * len(jobs)
        with watching():
            for action in self.order:
                stage = self.stages[action.stage]
                self.turn(stage.index)
                result = self._act(action, stage, jobs[action.microbatch], carrier)
                if result is not None:
                    results[action.microbatch] = result
        return results

    def forward(self, jobs: list[Job]) -> list[Any]:
        """Forwards alone, one micro-batch after the other."""
        with watching():
            return [self._through(job) for job in jobs]

    def drop(self) -> None:
        """Forget what an interrupted step has left behind."""
        for stage in self.stages:
            stage.drop()

    def _act(self, action: Action, stage: Stage, job: Job, carrier: _Carrier) -> Any:
        """One action; on the last stage, what a forward's result became."""
        if action.op in (Op.F, Op.FB):
            split_backward = (stage.index, job.number) in self.split
            made, result = stage.forward(job, carrier.receive(job, stage.index), split_backward)
            carrier.send(job, made)
            return result
        if action.op in (Op.B, Op.I):
            carrier.send_back(job, stage.backward(job, carrier.receive_back(job, stage.index)))
        else:
            stage.weight_gradient(job)
        return None

    def _through(self, job: Job) -> Any:
        carrier, result = _Carrier([job]), None
        for stage in self.stages:
            self.turn(stage.index)
            made, result = stage.forward(job, carrier.receive(job, stage.index))
            carrier.send(job, made)
        return result


class _Carrier:
    """Values and gradients on their way, each until its last reader has it."""

    def __init__(self, jobs: list[Job]) -> None:
        self.values: dict[tuple[int, int], torch.Tensor] = {}
        self.gradients: dict[tuple[int, int], torch.Tensor] = {}
        self.readers: dict[tuple[int, int], int] = {}
        for job in jobs:
            for incoming in job.path.incoming:
                for value in incoming:
                    self.readers[job.number, value] = self.readers.get((job.number, value), 0) + 1

    def send(self, job: Job, made: Values) -> None:
        for value, tensor in made.items():
            self.values[job.number, value] = tensor

    def receive(self, job: Job, stage: int) -> Values:
        received = {}
        for value in job.path.incoming[stage]:
            key = (job.number, value)
            received[value] = self.values[key]
            self.readers[key] -= 1
            if not self.readers[key]:
                del self.values[key]
        return received

    def send_back(self, job: Job, gradients: Values) -> None:
        for value, gradient in gradients.items():
            key = (job.number, value)
            known = self.gradients.get(key)
            self.gradients[key] = gradient if known is None else known + gradient

    def receive_back(self, job: Job, stage: int) -> Values:
        wanted = job.path.outgoing[stage]
        return {v: self.gradients.pop((job.number, v)) for v in wanted if (job.number, v) in self.gradients}
