"""Synchronous training: a mini-batch runs forward and backward through all stages, then the weights are updated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from penstock.engine.observer import Observers
from penstock.model.batch import as_call, rows_of
from penstock.model.buffers import Saved
from penstock.model.loss import Total
from penstock.model.seeding import random_states_kept
from penstock.model.stage import Job
from penstock.training.batches import input_gradients
from penstock.training.build_engine import Engine
from penstock.training.build_replicas import require_rows
from penstock.training.flush_updates import FlushUpdates, Update
from penstock.training.loss_checks import LossChecks
from penstock.training.micro_batches import scored
from penstock.training.pipeline_parts import PipelineParts, Step


class FlushPipeline(PipelineParts, Protocol):
    """The parts of a Pipeline that synchronous training needs."""

    @property
    def checks(self) -> LossChecks: ...
    @property
    def flush(self) -> FlushUpdates: ...
    @property
    def observers(self) -> Observers: ...

    def step(self, inputs: Any, target: Any = None) -> Step: ...


class FlushTrainer:
    """Trains a pipeline by a schedule that ends each mini-batch with an update."""

    def __init__(self, pipe: FlushPipeline, engine: Engine) -> None:
        assert engine.rows is not None
        self.pipe, self.engine, self.executor = pipe, engine, engine.executor
        self.rows, self.update_rows = engine.rows
        self.buffers: Saved  # values before the step

    def step(self, inputs: Any, target: Any) -> Step:
        """Train on one mini-batch; whatever fails, the model is then as it was before."""
        pipe, loss = self.pipe, self.pipe.require_loss()
        inputs, target = pipe.feed.one(inputs, target)
        pipe.checks.every_batch(loss, inputs, target)
        with torch.enable_grad(), input_gradients(inputs, pipe.ranks.alone) as scaled:
            total = pipe.again(lambda: self._run(*self._jobs(inputs, target, scored(loss))))
            scaled.by = pipe.optimizers.unit / (total.weight * pipe.optimizers.scale)
        pipe.checks.first_batch(loss, inputs, target)
        update = self._update(total)
        pipe.index += 1
        return Step(pipe.index - 1, total.mean, update.updated, update.norm)

    def train(self, batches: Iterator[tuple[Any, Any]]) -> Iterator[Step]:
        """Train on each mini-batch, for as long as the pipeline's schedule is this one's kind."""
        for inputs, target in batches:
            yield self.pipe.step(inputs, target)
            if self.pipe.async_trainer is not None:
                return

    def _jobs(self, inputs: Any, target: Any, finish: scored) -> tuple[list[Job], list[list[Job]], int]:
        """Return the jobs of a mini-batch; where stages have replicas, those of each slot of this process; and the
        mini-batch's rows."""
        pipe, shape = self.pipe, self.pipe.schedule.shape
        if not pipe.ranks.replicated:
            jobs = pipe.jobs(inputs, target, pipe.microbatches, finish)
            return jobs, [], sum(job.rows for job in jobs)
        rows = rows_of(as_call(inputs), target)
        require_rows(shape, rows)
        slots = self.executor.slots
        places = [(shape.replicas[shape.slot_rank[slot]], int(shape.slot_replica[slot])) for slot in slots]
        alike = len(set(shape.replicas)) == 1
        parts = (inputs, target, pipe.microbatches, finish, pipe.index)
        return [], pipe.micro_batches.by_replica(*parts, places, alike), rows

    def _run(self, jobs: list[Job], by_slot: list[list[Job]], rows: int) -> Total:
        """Run all forwards and backwards, and return the loss."""
        pipe = self.pipe
        root = pipe.flush.root(rows)
        for job in (job for some in (jobs, *by_slot) for job in some):
            job.root = root
        pipe.norms.forget()
        self.buffers = pipe.buffers.save()
        try:
            with random_states_kept(pipe.device), pipe.norms, pipe.flush.gathering(), pipe.busy():
                with pipe.health.of_run():
                    loss = self._run_rows(jobs, by_slot)
                loss.require_usable()
        except BaseException:
            self.executor.drop()
            pipe.flush.forget()
            pipe.buffers.restore(self.buffers)
            raise
        finally:
            for job in (job for some in (jobs, *by_slot) for job in some):
                job.mates = ()  # they refer to each other: a step's tensors would wait for the garbage collector
        pipe.buffers.learn(self.buffers)
        return loss

    def _run_rows(self, jobs: list[Job], by_slot: list[list[Job]]) -> Total:
        engine = self.engine
        if engine.clock is not None:
            engine.clock.forget()
        if engine.meter is not None:
            engine.meter.step_begins(self.pipe.observers)
        self.executor.begin(jobs, by_slot)
        with self.executor.watched():
            self.executor.run(self.rows)
        if engine.end is None:
            return self.executor.loss()
        every = [job.labels for some in by_slot for job in some if job.labels is not None]
        labels = list({id(one): one for one in every}.values())
        return engine.end.exchange(self.pipe.index, labels, self.pipe.micro_batches.memory)

    def _update(self, loss: Total) -> Update:
        """Run the update rows, once all ranks agree on the gradients."""
        pipe = self.pipe
        try:
            with pipe.health.of_update(pipe.optimizers):
                update = pipe.flush.agree(loss, pipe.index)
                self.executor.run(self.update_rows)
        except BaseException:
            pipe.flush.forget()
            pipe.buffers.restore(self.buffers)
            raise
        pipe.norms.move()
        if self.engine.clock is not None:
            self.engine.clock.finish(batches=1)
        return update
