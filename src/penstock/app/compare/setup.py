"""The common setup of a comparison: the config, each method's changes to it, and the activations of its stages."""

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

STRAIGHT = "1f1b"  # its stages are those of all methods without chunks and split backward
ALIKE = ("naive", "gpipe", STRAIGHT, "dapple")
ONE_STAGE: dict[str, Any] = {"pipeline.stages": 1, "pipeline.cuts": None}
WHOLE: dict[str, Any] = {"pipeline.replicas": 1, "pipeline.shard": None}  # micro-batches that no replicas divide


def require_rate(where: str, task: Task) -> None:
    """Raise unless the config sets the learning rate at which the methods are compared."""
    if "lr" not in task.config.optimizer.arguments:
        raise FormatError(f"{where}: optimizer.lr", "the learning rate that all methods share", "nothing", "add it")


def require_own_stages(where: str, task: Task) -> None:
    """Raise if the config names a plan: a plan is for one schedule, and the methods share their stages."""
    if task.config.pipeline.plan is not None:
        came = task.config.pipeline.plan
        raise FormatError(f"{where}: pipeline.plan", "pipeline.stages, for all methods", came, "give them in its place")


def batch_rows(task: Task) -> int:
    """Return the samples of a mini-batch."""
    inputs, target = next(task.batches(0, 1))
    return rows_of(as_call(inputs), target)


@dataclass(frozen=True)
class Setup:
    """The user's request and its config."""

    base: Request
    config: Config
    micro_batch_bytes_of: dict[str, list[MicroBatchBytes]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return self.config.training.steps

    def usual(self) -> list[str]:
        """Return the default methods, the config's own schedule among them."""
        names = [method.name for method in NAMED.values() if method.usual]
        own = self.config.pipeline.schedule
        return names if own in names else [*names, own]

    def request(self, method: Method) -> Request:
        """Return the request for a method. The config's own schedule keeps its own chunks and options."""
        if method.schedule is None:
            return Request(self.base.config, self.base.changes)
        section, options = self.config.pipeline, method.options
        own = method.schedule == section.schedule and not method.asynchronous
        changes = {
            "pipeline.schedule": method.schedule,
            "pipeline.options": section.options | options if own else options,
            "pipeline.chunks": section.chunks if own else None,
            "pipeline.shard": None if method.asynchronous else section.shard,
        }
        if method.nesterov:
            changes["optimizer"] = self._nesterov_section()
        return Request(self.base.config, self.base.changes | changes)

    def prepare(self, methods: Sequence[Method]) -> None:
        """Split the model for the stages that most methods share, so that a model that cannot be split is refused
        once."""
        for method in methods:
            if method.schedule is not None and self.stages_of(method) == STRAIGHT:
                self.stage_activations(method)
                return

    def stage_activations(self, method: Method) -> list[MicroBatchBytes]:
        """Return the bytes that each stage keeps of one micro-batch of a method."""
        name = self.stages_of(method)
        if name not in self.micro_batch_bytes_of:
            self.micro_batch_bytes_of[name] = micro_batch_bytes(self._sample(method, name).task())
        return self.micro_batch_bytes_of[name]

    def build_schedule(self, method: Method, task: Task) -> Schedule | Loop:
        section = task.config.pipeline
        if method.schedule is None:
            return read_schedule(ScheduleChoice(STRAIGHT, 1, section.microbatches), None)
        named = (section.schedule, section.stages, section.microbatches, section.chunks, section.options)
        return read_schedule(ScheduleChoice(*named, replicas=section.replicas), section.cuts)

    def stages_of(self, method: Method) -> str:
        """Return the name of the schedule whose stages a method has: its own, or the straight pipeline."""
        if method.schedule is None:
            return method.name
        return STRAIGHT if method.asynchronous or method.schedule in ALIKE else method.schedule

    def _sample(self, method: Method, name: str) -> Request:
        """Return the request for a synchronous training with the method's stages."""
        if name == method.schedule:
            own = self.request(method)
            return Request(own.config, own.changes | WHOLE)
        changes: dict[str, Any] = {"pipeline.schedule": STRAIGHT, "pipeline.options": {}, "pipeline.chunks": None}
        one = ONE_STAGE if method.schedule is None else {}
        return Request(self.base.config, self.base.changes | changes | WHOLE | one)

    def _nesterov_section(self) -> dict[str, Any]:
        """Return an optimizer section for NAdam with the learning rate and weight decay of the config's optimizer."""
        section = self.config.optimizer
        defaults = Task(self.config).optimizer([""], [torch.nn.Parameter(torch.zeros(1, 1))]).defaults
        section_of_nesterov = {
            "name": "nesterov",
            "lr": defaults["lr"],
            "weight_decay": defaults.get("weight_decay", 0.0),
        }
        return (
            section_of_nesterov
            if section.scheduler is None
            else section_of_nesterov | {"scheduler": section.scheduler.model_dump()}
        )
