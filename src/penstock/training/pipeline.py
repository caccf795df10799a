"""The Pipeline: a model, cut into stages, trained by a schedule, with the numbers of plain training.

One process runs all stages; or, launched as several (by torchrun, or by `penstock train`), each runs its own. The
script is the same, and so are the bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn

from penstock.core.arguments import named, parameters_of, refuse_unknown
from penstock.core.loop import Loop
from penstock.core.lowered_loop import ActionRow
from penstock.core.schedule import Schedule
from penstock.core.timeline import Timeline
from penstock.errors import InputError
from penstock.model.loss import Total, total_of
from penstock.model.materialise import read_later
from penstock.model.replay import PathChangedError
from penstock.model.seeding import random_states_kept
from penstock.model.stage import Job
from penstock.schedules.options import TrainingOptions
from penstock.schedules.registry import OPTIONS
from penstock.training.async_trainer import AsyncTrainer
from penstock.training.batches import input_gradients
from penstock.training.build import Assembled, assemble
from penstock.training.build_engine import SETTLED, Engine, build_engine, choose, describe
from penstock.training.evaluation import Forwards
from penstock.training.flush_updates import Update
from penstock.training.health import Health
from penstock.training.loss_checks import LossChecks, in_eval_mode
from penstock.training.measurement.gather import gathered, gathered_run, timeline_here
from penstock.training.measurement.measured import Measured
from penstock.training.micro_batches import Cut, Finish, MicroBatches, scored
from penstock.training.model_state import take_state, whole_state
from penstock.training.options import Wanted, read_course, require_plain_loss
from penstock.training.pipeline_parts import LossFunction, Step
from penstock.training.processes import require_agreement
from penstock.training.staleness import NAMES as REMEDIES


class Pipeline:
    """Train `model` as a pipeline. `example` is one small batch of its inputs; see the user's guide for the rest.

    How: by `stages` or `cuts`, a `schedule` ("1f1b") and a number of `microbatches` (4); or by a `plan`, which says all
    of these: a Plan, what `penstock.plan` returns, or the path of the JSON that `penstock plan` writes. Process r runs
    the plan's rank r.
    `verify`: whether the split model is compared with the whole one on the example, and the first step's loss with the
    whole batch's. `recompute` is never, except-last or always. `offload` is False, or what waits in host memory:
    "activations" (the same as True), "weights" (of stages that wait; between steps they lie there too), or "all".
    `data` is "every" where
    each rank is given the same batches, "rank0" where rank 0 has them and the others pass None. `transport` and
    `timeout` (seconds that a rank may wait for another) are for several processes. `timeline`: whether times of
    each step are kept. `load`, a function from a parameter's name to its values, fills a weightless model; it is
    asked for what this process runs. The path of a safetensors file or of a transformers directory fills any model,
    each process reading its own part.
    """

    @named
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        example: Any,
        stages: int | None = None,
        schedule: str | Schedule | Loop | None = None,
        microbatches: int | None = None,
        loss: LossFunction | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        cuts: Sequence[str] | None = None,
        chunks: int | None = None,
        plan: Any = None,
        recompute: str = "never",
        offload: bool | str = False,
        precision: str | None = None,
        clip: float | None = None,
        accumulate: int = 1,
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        seed: int = 0,
        verify: bool = True,
        data: str = "every",
        transport: str | None = None,
        timeout: float = 120.0,
        timeline: bool = True,
        load: Callable[[str], torch.Tensor] | str | os.PathLike[str] | None = None,
        **options: Unpack[TrainingOptions],
    ) -> None:
        refuse_unknown("Pipeline", options, [*parameters_of(Pipeline), *OPTIONS, *REMEDIES, *SETTLED])
        require_plain_loss(loss)
        fill = read_later if isinstance(load, (str, os.PathLike)) else load
        given = {"stages": stages, "schedule": schedule, "microbatches": microbatches, "cuts": cuts, "chunks": chunks}
        course = read_course(plan, given, dict(options))
        self.wanted = Wanted(
            model, example, course.stages, course.schedule, course.microbatches, optimizer, cuts, course.chunks,
            recompute, offload, precision, clip, accumulate, lr_scheduler, seed, verify, data, transport, timeout,
            timeline, fill, course.options, course.plan,
        )  # fmt: skip
        self.loss, self.index, self.verify = loss, 0, verify
        self.working = False  # inside a step
        parts: Assembled = assemble(self.wanted)
        self.model, self.split, self.ground, self.feed = parts.split.model, parts.split, parts.ground, parts.feed
        self.norms, self.buffers = parts.norms, parts.buffers
        self.crew, self.stages, self.optimizers = self.ground.crew, self.ground.stages, self.ground.optimizers
        self.flush, self.observers = self.ground.flush, self.ground.observers
        self.engine: Engine | None = None
        self.health = Health(self.crew)
        self.settings, self.device = self.ground.settings, self.ground.settings[0].device
        self.micro_batches = MicroBatches(self.split, self.feed, self.settings[0])
        self.checks, self.forwards = LossChecks(self), Forwards(self)
        self._take_up(parts.engine)
        if isinstance(load, (str, os.PathLike)):
            self.import_weights(load)

    def _take_up(self, engine: Engine) -> None:
        """Train by this engine from now on."""
        if self.engine is not None:
            self.observers.discard(*self.engine.observers, self.engine.meter)
        self.observers.add(*engine.observers)
        self.engine, self.executor, self.clock = engine, engine.executor, engine.clock
        self.schedule, self.microbatches = engine.schedule, engine.schedule.shape.microbatches
        self.async_trainer: AsyncTrainer | None = None
        if engine.updates is not None and engine.weights is not None and engine.status is not None:
            engine.updates.since = self.index
            self.async_trainer = AsyncTrainer(
                self, self.executor, engine.weights, engine.updates, engine.status, engine.clock, engine.remedies.t3
            )

    @named
    def step(self, inputs: Any, target: Any = None) -> Step:
        """One synchronous step over a batch: all micro-batches forward and backward, then the update.

        `inputs` are a tensor, a tuple of arguments, or a dict of keywords, whose labels may be among them.
        """
        loss = self.require_loss()
        self.health.require()
        if self.async_trainer is not None:
            return self.async_trainer.step(inputs, target)
        inputs, target = self.feed.one(inputs, target)
        self.checks.every_batch(loss, inputs, target)
        with torch.enable_grad(), input_gradients(inputs, self.crew.alone) as scaled:
            found = self.again(lambda: self._run(self.jobs(inputs, target, self.microbatches, scored(loss))))
            scaled.by = self.optimizers.unit / (found.weight * self.optimizers.scale)
        self.checks.first_batch(loss, inputs, target)
        update = self._updated(found)
        self.index += 1
        return Step(self.index - 1, found.mean, update.updated, update.norm)

    @named
    def train(self, loader: Iterable[Any] | None) -> Iterator[Step]:
        """One record a batch of the loader, which yields (inputs, target), or dicts of the forward's keywords.

        Under an asynchronous schedule the pipe is fed without a flush, and a record comes when its batch has passed
        through; the pipe drains at the end, at an evaluation, at a save, and when the loop is left. A switch inside the
        loop has the rest of the batches trained by the new schedule.
        """
        self.require_loss()
        self.health.require()
        batches = self.feed.each(loader)
        while True:
            trainer = self.async_trainer
            yield from self._flushed(batches) if trainer is None else trainer.train(batches)
            if self.async_trainer is trainer:
                return

    @named
    def switch(
        self,
        schedule: str | Schedule | Loop,
        *,
        microbatches: int | None = None,
        **options: Unpack[TrainingOptions],
    ) -> None:
        """Go on by another schedule, between two mini-batches; what is in flight is trained to its end first.

        The stages stay as they are, so the schedule must place as many on the same ranks. Optimizers keep their state.
        """
        refuse_unknown("Pipeline.switch", options, [*parameters_of(Pipeline.switch), *OPTIONS, *REMEDIES, *SETTLED])
        self._require_between()
        own = schedule.shape.microbatches if isinstance(schedule, (Schedule, Loop)) else self.microbatches
        parts = own if microbatches is None else microbatches
        wanted = replace(self.wanted, schedule=schedule, microbatches=parts, options=dict(options), plan=None)
        chosen = choose(wanted, self.schedule.shape.ranks, None)
        if chosen.built.shape.placement != self.schedule.shape.placement:
            raise InputError(
                f"a schedule for {self.split.pieces} stages placed on ranks {list(self.schedule.shape.placement)}",
                f"{chosen.built.shape.name} with {list(chosen.built.shape.placement)}",
                "make a Pipeline of its own for it",
            )
        if not self.crew.alone:
            require_agreement(self.crew, {"schedule": describe(chosen), "micro-batches": parts})
        self.settle()
        engine = build_engine(chosen, self.ground, self.split.edges)
        self.wanted = wanted
        self._take_up(engine)

    def settle(self) -> None:
        """Train to its end what is in flight: all weights are then the newest. Synchronous schedules leave nothing."""
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
        """The mean loss over a loader, in eval mode, without gradients."""
        self.settle()
        loss, total, weight = self.require_loss(), 0.0, 0.0
        with in_eval_mode(self.model), torch.no_grad():
            for batch in self.feed.each(loader):
                inputs, target = self.feed.one(*batch)
                self.checks.every_batch(loss, inputs, target)
                found = total_of(self.forwards.each(inputs, target, scored(loss)))
                total, weight = total + found.total, weight + found.weight
        total, weight = self.crew.tell([total, weight])
        if not weight:
            raise InputError("a loader with something to score", "nothing", "give data to evaluate")
        return float(total / weight)

    @named
    def forward(self, inputs: Any) -> Any:
        """The model's result for a batch, without gradients, in the mode the model is in: on every rank."""
        self.settle()
        inputs, _ = self.feed.one(inputs, None)
        return self.forwards.result(inputs)

    def state_dict(self) -> dict[str, Any]:
        """The whole model's state under its own names, on every rank."""
        self.settle()
        return whole_state(self.crew, self.split)

    @named
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the whole model's state; each rank takes what its stages need.

        What optimizers, and remedies against stale weights, keep of the steps before stays as it is.
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
        """Take up the training where `path` was saved, by whatever stages; every rank has to call."""
        from penstock.training.checkpoint import save_load

        if self.crew.alone:  # which makes up for whatever has failed
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

        What optimizers, and remedies against stale weights, keep of the steps before stays as it is.
        """
        from penstock.training.weight_files import import_weights

        self.settle()
        import_weights.import_weights(self, path)

    def measured(self) -> Measured:
        """The last steps as they were measured on all ranks; every rank has to ask."""
        return gathered(self)

    def timeline(self) -> Timeline:
        """The last step as it was measured on all ranks; every rank has to ask. In one process stages run one after the
        other.

        Under an asynchronous schedule, the last run from its fill to its drain; what is in flight is drained first.
        """
        self.settle()
        if self.async_trainer is not None:
            return gathered_run(self)
        return timeline_here(self) if self.crew.alone else self.measured().timeline()

    def close(self) -> None:
        """Let go of what joins this pipeline's processes, which the end of the process does too. By every rank."""
        self.settle()
        self.executor.close()

    def _flushed(self, batches: Iterator[tuple[Any, Any]]) -> Iterator[Step]:
        """Step by step, for as long as the schedule is a synchronous one."""
        for inputs, target in batches:
            yield self.step(inputs, target)
            if self.async_trainer is not None:
                return

    def _run(self, jobs: list[Job]) -> Total:
        """Run all forwards and backwards; whatever goes wrong, the model is then as it was before."""
        assert self.engine is not None
        assert self.engine.rows is not None
        root = self.flush.root(sum(job.rows for job in jobs))
        for job in jobs:
            job.root = root
        self.norms.forget()
        before = self.before = self.buffers.save()
        try:
            with random_states_kept(self.device), self.norms, self.flush.gathering(), self.busy():
                with self.health.of_run():
                    loss = self._run_rows(self.engine, jobs, self.engine.rows[0])
                loss.require_usable()
        except BaseException:
            self.executor.drop()
            self.flush.forget()
            self.buffers.restore(before)
            raise
        finally:
            for job in jobs:
                job.mates = ()  # they know of each other: a step's tensors would live on until that is found
        self.buffers.learn(before)
        return loss

    def _run_rows(self, engine: Engine, jobs: list[Job], rows: list[list[ActionRow]]) -> Total:
        """Run the rows of a mini-batch before its updates."""
        if engine.clock is not None:
            engine.clock.forget()
        if engine.meter is not None:
            engine.meter.step_begins(self.observers)
        self.executor.begin(jobs)
        with self.executor.stages.watched():
            self.executor.run(rows)
        return self.executor.loss()

    def _updated(self, loss: Total) -> Update:
        assert self.engine is not None
        assert self.engine.rows is not None
        try:
            with self.health.of_update(self.optimizers):
                update = self.flush.agree(loss, self.index)
                self.executor.run(self.engine.rows[1])
        except BaseException:
            self.flush.forget()
            self.buffers.restore(self.before)
            raise
        self.norms.move()
        if self.clock is not None:
            self.clock.finish(batches=1)
        return update

    def again(self, run: Callable[[], Any]) -> Any:
        """Run something, and once more if a path has changed: it is then traced afresh, where all weights are."""
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
        """The micro-batches of one mini-batch, numbered from `first_number` on."""
        with torch.enable_grad():
            return self.jobs(inputs, target, self.microbatches, scored(self.require_loss()), step, first_number)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around what nobody may change the pipeline in."""
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


__all__ = ["Pipeline", "Step"]
