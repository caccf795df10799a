"""The Pipeline: trains a model in stages by a schedule, with the numbers of plain training.

One process runs all stages; or, launched as several (by torchrun, or by `penstock train`), each runs its own. The
script is the same, and so are the bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import torch

from penstock.core.arguments import named, parameters_of, refuse_unknown, takes
from penstock.core.loop import Loop
from penstock.core.schedule import Schedule
from penstock.core.shape import Shape
from penstock.core.timeline import Timeline
from penstock.errors import InputError
from penstock.model.loss import total_of
from penstock.model.replay import PathChangedError
from penstock.model.stage import Job
from penstock.schedules.options import TrainingOptions
from penstock.schedules.registry import option_names
from penstock.training.async_trainer import AsyncTrainer
from penstock.training.build import Assembled, assemble
from penstock.training.build_engine import SETTLED, Engine, build_engine, choose, describe
from penstock.training.evaluation import Forwards
from penstock.training.flush_trainer import FlushTrainer
from penstock.training.health import Health
from penstock.training.loss_checks import LossChecks, in_eval_mode
from penstock.training.measurement.gather import gathered, gathered_run, timeline_here
from penstock.training.measurement.measured import Measured
from penstock.training.micro_batches import Cut, Finish, MicroBatches, scored
from penstock.training.model_state import take_state, whole_state
from penstock.training.options import LossFunction, PipelineOptions, document_options
from penstock.training.pipeline_parts import Step
from penstock.training.processes import require_agreement
from penstock.training.schedule_choice import ScheduleChoice, read_choice
from penstock.training.staleness import NAMES as MITIGATIONS


@document_options
class Pipeline:
    """Train `model` as a pipeline, by a synchronous or an asynchronous schedule.

    How: by `stages` or `cuts`, a `schedule` and a number of `microbatches`; or by a `plan`, which says all of these.
    """

    @takes(PipelineOptions, others=lambda: (*option_names(), *SETTLED))
    def __init__(self, options: PipelineOptions, others: dict[str, Any]) -> None:
        """Split the model, prove the schedule, and connect the ranks."""
        self.options, self.choice = options, read_choice(options, others)
        self.loss, self.index, self.verify = options.loss, 0, options.verify
        self.working = False  # inside a step
        parts: Assembled = assemble(options, self.choice)
        self.model, self.split, self.context, self.feed = parts.split.model, parts.split, parts.context, parts.feed
        self.norms, self.buffers = parts.norms, parts.buffers
        self.ranks, self.stages, self.optimizers = self.context.ranks, self.context.stages, self.context.optimizers
        self.flush, self.observers = self.context.flush, self.context.observers
        self.engine: Engine | None = None
        self.health = Health(self.ranks)
        self.settings, self.device = self.context.settings, self.context.settings[0].device
        self.micro_batches = MicroBatches(self.split, self.feed, self.settings[0])
        self.checks, self.forwards = LossChecks(self), Forwards(self)
        self._take_up(parts.engine)
        if options.weights_path is not None:
            self.import_weights(options.weights_path)

    def _take_up(self, engine: Engine) -> None:
        """Use this engine from now on."""
        if self.engine is not None:
            self.observers.discard(*self.engine.observers, self.engine.meter)
        self.observers.add(*engine.observers)
        self.engine, self.executor, self.clock = engine, engine.executor, engine.clock
        self.schedule, self.microbatches = engine.schedule, engine.schedule.shape.microbatches
        self.async_trainer: AsyncTrainer | None = None
        self.trainer: FlushTrainer | AsyncTrainer
        if engine.updates is not None and engine.weights is not None and engine.status is not None:
            engine.updates.since = self.index
            self.trainer = self.async_trainer = AsyncTrainer(
                self, self.executor, engine.weights, engine.updates, engine.status, engine.clock, engine.mitigation.t3
            )
        else:
            self.trainer = FlushTrainer(self, engine)

    @named
    def step(self, inputs: Any, target: Any = None) -> Step:
        """Train on one batch synchronously: all micro-batches forward and backward, then the update.

        `inputs` are a tensor, a tuple of arguments, or a dict of keywords, which may include the labels.
        """
        self.require_loss()
        self.health.require()
        return self.trainer.step(inputs, target)

    @named
    def train(self, loader: Iterable[Any] | None) -> Iterator[Step]:
        """Train on every batch of a loader of (inputs, target) or keyword dicts, and yield one record for each.

        Under an asynchronous schedule the pipeline is fed without a flush, and a record comes when its batch has passed
        all stages; it drains at the end, at an evaluation, at a save, and when the loop is left. After a switch inside
        the loop the remaining batches are trained by the new schedule.
        """
        self.require_loss()
        self.health.require()
        batches = self.feed.each(loader)
        while True:
            trainer = self.trainer
            yield from trainer.train(batches)
            if self.trainer is trainer or (self.async_trainer is None and isinstance(trainer, FlushTrainer)):
                return

    @named
    def switch(
        self,
        schedule: str | Schedule | Loop,
        *,
        microbatches: int | None = None,
        **options: Unpack[TrainingOptions],
    ) -> None:
        """Change the schedule between two mini-batches; those in flight are trained to their end first.

        The stages stay as they are, so the schedule must place as many on the same ranks. Optimizers keep their state.
        """
        names = [*parameters_of(Pipeline.switch), *option_names(), *MITIGATIONS, *SETTLED]
        refuse_unknown("Pipeline.switch", options, names)
        self._require_between()
        own = schedule.shape.microbatches if isinstance(schedule, (Schedule, Loop)) else self.microbatches
        parts = own if microbatches is None else microbatches
        shape = self.schedule.shape
        choice = ScheduleChoice(
            schedule, shape.ranks, parts, self.choice.chunks, dict(options),
            replicas=shape.replicas if isinstance(schedule, str) else 1,
        )  # fmt: skip
        chosen = choose(choice, self.options, None)
        _require_same_places(self.schedule.shape, chosen.built.shape)
        if not self.ranks.alone:
            require_agreement(self.ranks, {"schedule": describe(chosen), "micro-batches": parts})
        self.settle()
        engine = build_engine(chosen, self.context, self.split.edges)
        self.choice = choice
        self._take_up(engine)

    def settle(self) -> None:
        """Train the mini-batches in flight to their end, so that all weights are the newest."""
        if self.working:
            raise InputError(
                "a save, a load, an evaluation or a forward between two mini-batches",
                "one inside a mini-batch",
                "call it when the step is over",
            )
        self.health.require()
        if self.async_trainer is not None:
            self.async_trainer.drain()

    @named
    def evaluate(self, loader: Iterable[Any] | None) -> float:
        """Return the mean loss over a loader, in eval mode, without gradients."""
        self.settle()
        loss, total, weight = self.require_loss(), 0.0, 0.0
        with in_eval_mode(self.model), torch.no_grad():
            for batch in self.feed.each(loader):
                inputs, target = self.feed.one(*batch)
                self.checks.every_batch(loss, inputs, target)
                part = total_of(self.forwards.each(inputs, target, scored(loss)))
                total, weight = total + part.total, weight + part.weight
        total, weight = self.ranks.broadcast([total, weight])
        if not weight:
            raise InputError("a loader with something to score", "nothing", "give data to evaluate")
        return float(total / weight)

    @named
    def forward(self, inputs: Any) -> Any:
        """Return the model's result for a batch on every rank, without gradients, in the mode the model is in."""
        self.settle()
        inputs, _ = self.feed.one(inputs, None)
        return self.forwards.result(inputs)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole model's state under its own names, on every rank."""
        self.settle()
        return whole_state(self.ranks, self.split)

    @named
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the whole model's state; each rank takes what its stages need.

        The state of optimizers and of staleness mitigation does not change.
        """
        self.settle()
        take_state(self.split, state)

    @named
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the training state to a new directory, between two steps; every rank has to call."""
        from penstock.training.checkpoint import save_load  # not at the top: torch's part of it takes long to import

        self.settle()
        save_load.save(self, path)

    @named
    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue the training saved at `path`, by any number of stages; every rank has to call."""
        from penstock.training.checkpoint import save_load

        if self.ranks.alone:  # a load makes up for an earlier failure
            self.health.why = ""
        self.settle()
        save_load.load(self, path)

    @named
    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the weights to a new safetensors file, or a transformers model to a new directory; by every rank."""
        from penstock.training.weight_files import export  # not at the top, as few need it

        self.settle()
        export.export(self, path)

    @named
    def import_weights(self, path: str | os.PathLike[str]) -> None:
        """Take the weights from a safetensors file or a transformers directory; every rank has to call.

        The state of optimizers and of staleness mitigation does not change.
        """
        from penstock.training.weight_files import import_weights

        self.settle()
        import_weights.import_weights(self, path)

    def measured(self) -> Measured:
        """Return the last steps as measured on all ranks; every rank has to call."""
        return gathered(self)

    def timeline(self) -> Timeline:
        """Return the last step as measured on all ranks; every rank has to call.

        In one process the stages run one after the other. Under an asynchronous schedule it is the last run from its
        fill to its drain; mini-batches in flight are drained first.
        """
        self.settle()
        if self.async_trainer is not None:
            return gathered_run(self)
        return timeline_here(self) if self.ranks.alone else self.measured().timeline()

    def close(self) -> None:
        """Close the lanes between this pipeline's processes, as their end does too; every rank has to call."""
        self.settle()
        self.executor.close()

    def again(self, run: Callable[[], Any]) -> Any:
        """Run a function, and once more if a path has changed: it is traced again where all weights are here.

        Walks are watched once for the whole run, as entering that takes longer than a small stage.
        """
        with self.split.watched():
            try:
                return run()
            except PathChangedError:
                if not self.split.whole:
                    raise
            return run()

    def require_loss(self) -> LossFunction:
        if self.loss is None:
            raise InputError("a loss to train or evaluate", "none", "give loss= to the Pipeline")
        return self.loss

    def jobs(
        self, inputs: Any, target: Any, cut: Cut, finish: Finish, step: int | None = None, first_number: int = 0
    ) -> list[Job]:
        step = self.index if step is None else step
        return self.micro_batches.jobs(inputs, target, cut, finish, step, first_number)

    def mini_batch(self, inputs: Any, target: Any, step: int, first_number: int) -> list[Job]:
        """Return the micro-batches of one mini-batch, numbered from `first_number` on."""
        with torch.enable_grad():
            return self.jobs(inputs, target, self.microbatches, scored(self.require_loss()), step, first_number)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark a step as running: switch, save and load are refused."""
        self.working = True
        try:
            yield
        finally:
            self.working = False

    def _require_between(self) -> None:
        if self.working or self.optimizers.steps:
            raise InputError(
                "a switch of the schedule between two mini-batches",
                "one inside a mini-batch" + (", whose accumulation is not finished" if self.optimizers.steps else ""),
                "switch when the step is over",
            )


def _require_same_places(ours: Shape, theirs: Shape) -> None:
    """Refuse a schedule whose stages are on other ranks, or have other replicas."""
    if (theirs.placement, theirs.replicas) == (ours.placement, ours.replicas):
        return
    replicas = max(*ours.replicas, *theirs.replicas) > 1
    raise InputError(
        f"a schedule for {ours.stages} stages placed on ranks {list(ours.placement)}"
        + (f" with replicas {list(ours.replicas)}" if replicas else ""),
        f"{theirs.name} with {list(theirs.placement)}" + (f" and {list(theirs.replicas)}" if replicas else ""),
        "make a Pipeline of its own for it",
    )


__all__ = ["Pipeline", "Step"]
