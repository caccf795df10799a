"""The parts of a Pipeline that its helpers use, as protocols, so that they do not import the Pipeline itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from penstock.core.arguments import named_fields
from penstock.core.loop import Loop
from penstock.core.schedule import Schedule
from penstock.engine.executor import Executor
from penstock.engine.measure.clock import Clock
from penstock.engine.weights.select import VersionedWeights
from penstock.model.batchnorm import DeferredNorms
from penstock.model.buffers import Buffers
from penstock.model.split import Split
from penstock.model.stage import Job, Settings, Stage
from penstock.training.async_updates import StageUpdates
from penstock.training.batches import Feed
from penstock.training.build_engine import Engine
from penstock.training.health import Health
from penstock.training.micro_batches import Cut, Finish, MicroBatches
from penstock.training.options import LossFunction, PipelineOptions
from penstock.training.processes import Ranks
from penstock.training.stage_optimizers import Optimizers


@named_fields
@dataclass(frozen=True)
class Step:
    """Outcome of one step, the same on every rank."""

    index: int
    loss: float
    updated: bool = True
    gradient_norm: float | None = None


class AsyncTraining(Protocol):
    """Asynchronous training, as a pipeline holds it."""

    @property
    def weights(self) -> VersionedWeights: ...
    @property
    def updates(self) -> StageUpdates: ...


class PipelineParts(Protocol):
    """Attributes and methods of a Pipeline for saving, loading, checking and measuring it."""

    index: int

    @property
    def ranks(self) -> Ranks: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def split(self) -> Split: ...
    @property
    def stages(self) -> list[Stage]: ...
    @property
    def settings(self) -> tuple[Settings, ...]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def optimizers(self) -> Optimizers: ...
    @property
    def schedule(self) -> Schedule | Loop: ...
    @property
    def engine(self) -> Engine | None: ...
    @property
    def executor(self) -> Executor: ...
    @property
    def clock(self) -> Clock | None: ...
    @property
    def async_trainer(self) -> AsyncTraining | None: ...
    @property
    def health(self) -> Health: ...
    @property
    def options(self) -> PipelineOptions: ...
    @property
    def verify(self) -> bool: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def micro_batches(self) -> MicroBatches: ...
    @property
    def feed(self) -> Feed: ...
    @property
    def norms(self) -> DeferredNorms: ...
    @property
    def buffers(self) -> Buffers: ...

    def settle(self) -> None: ...
    def busy(self) -> AbstractContextManager[None]: ...
    def again(self, run: Callable[[], Any]) -> Any: ...
    def require_loss(self) -> LossFunction: ...
    def jobs(
        self, inputs: Any, target: Any, cut: Cut, finish: Finish, step: int | None = None, first_number: int = 0
    ) -> list[Job]: ...
    def mini_batch(self, inputs: Any, target: Any, step: int, first_number: int) -> list[Job]: ...
