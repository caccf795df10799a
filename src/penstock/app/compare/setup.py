"""What the methods of a comparison have in common: the config, each method's changes to it, and what stages keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.app.compare.memory import micro_batch_bytes
from penstock.app.compare.methods import NAMED, Method
from penstock.app.config.schema import Config
from penstock.app.config.task import Task
from penstock.app.run.request import Request
from penstock.core.loop import Loop
from penstock.core.schedule import Schedule
from penstock.engine.measure.activation_bytes import MicroBatchBytes
from penstock.errors import FormatError
from penstock.model.batch import as_call, rows_of
from penstock.training.schedule_choice import ScheduleChoice, read_schedule

STRAIGHT = "1f1b"  # whose stages are those of all methods without chunks and without a split backward
ALIKE = ("naive", "gpipe", STRAIGHT, "dapple")
ONE_STAGE: dict[str, Any] = {"pipeline.stages": 1, "pipeline.cuts": None}


def require_rate(where: str, task: Task) -> None:
    """Methods are compared at a learning rate that somebody has chosen."""
    if "lr" not in task.config.optimizer.arguments:
        raise FormatError(f"{where}: optimizer.lr", "the learning rate that all methods share", "nothing", "add it")


def require_own_stages(where: str, task: Task) -> None:
    """A plan is for one schedule; the methods share stages that are none's in particular."""
    if task.config.pipeline.plan is not None:
        came = task.config.pipeline.plan
        raise FormatError(f"{where}: pipeline.plan", "pipeline.stages, for all methods", came, "give them in its place")


def batch_rows(task: Task) -> int:
    """Samples of a mini-batch."""
    inputs, target = next(task.batches(0, 1))
    return rows_of(as_call(inputs), target)


@dataclass(frozen=True)
class Setup:
    """The request, and the config that it means."""

    asked: Request
    config: Config
    known: dict[str, list[MicroBatchBytes]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return self.config.training.steps

    def usual(self) -> list[str]:
        """The methods of a comparison that names none: the config's own schedule is among them."""
        names = [method.name for method in NAMED.values() if method.usual]
        own = self.config.pipeline.schedule
        return names if own in names else [*names, own]

    def request(self, method: Method) -> Request:
        """The same config by another method. Its own schedule keeps its own chunks and options."""
        if method.schedule is None:
            return Request(self.asked.config, self.asked.changes)
        section, options = self.config.pipeline, method.options
        own = method.schedule == section.schedule and not method.asynchronous
        changes = {
            "pipeline.schedule": method.schedule,
            "pipeline.options": section.options | options if own else options,
            "pipeline.chunks": section.chunks if own else None,
        }
        if method.nesterov:
            changes["optimizer"] = self._look_ahead()
        return Request(self.asked.config, self.asked.changes | changes)

    def prepare(self, methods: Sequence[Method]) -> None:
        """Refuse here, once, a model that cannot be split; most methods share its stages."""
        for method in methods:
            if method.schedule is not None and self.stages_of(method) == STRAIGHT:
                self.kept(method)
                return

    def kept(self, method: Method) -> list[MicroBatchBytes]:
        """What each stage keeps of one micro-batch."""
        name = self.stages_of(method)
        if name not in self.known:
            self.known[name] = micro_batch_bytes(self._sample(method, name).task())
        return self.known[name]

    def built(self, method: Method, task: Task) -> Schedule | Loop:
        section = task.config.pipeline
        if method.schedule is None:
            return read_schedule(ScheduleChoice(STRAIGHT, 1, section.microbatches), None)
        choice = ScheduleChoice(section.schedule, section.stages, section.microbatches, section.chunks, section.options)
        return read_schedule(choice, section.cuts)

    def stages_of(self, method: Method) -> str:
        """Whose stages a method has: its own, or those of the straight pipeline."""
        if method.schedule is None:
            return method.name
        return STRAIGHT if method.asynchronous or method.schedule in ALIKE else method.schedule

    def _sample(self, method: Method, name: str) -> Request:
        """A synchronous training with the method's stages."""
        if name == method.schedule:
            return self.request(method)
        changes: dict[str, Any] = {"pipeline.schedule": STRAIGHT, "pipeline.options": {}, "pipeline.chunks": None}
        one = ONE_STAGE if method.schedule is None else {}
        return Request(self.asked.config, self.asked.changes | changes | one)

    def _look_ahead(self) -> dict[str, Any]:
        """NAdam at the learning rate and weight decay of the config's optimizer."""
        section = self.config.optimizer
        usual = Task(self.config).optimizer([""], [torch.nn.Parameter(torch.zeros(1, 1))]).defaults
        found = {"name": "nesterov", "lr": usual["lr"], "weight_decay": usual.get("weight_decay", 0.0)}
        return found if section.scheduler is None else found | {"scheduler": section.scheduler.model_dump()}
