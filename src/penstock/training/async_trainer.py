"""Asynchronous training: mini-batches are fed without a flush, and a record comes out when each is done.

Record k comes at the same point of the loop's body on every rank, so leaving the loop after it fixes the drain on all
ranks: every mini-batch taken from the loader by then is trained to its end. An evaluation or a save in between drains
the pipeline too; it fills again afterwards.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isfinite, sqrt
from typing import Any, Protocol

import torch

from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow, LoweredLoop
from penstock.engine.executor import Executor
from penstock.engine.measure.clock import Clock
from penstock.engine.weights.select import VersionedWeights
from penstock.errors import InputError, LeftAlone
from penstock.model.batch import as_call, rows_of
from penstock.model.seeding import random_states_kept
from penstock.model.stage import Job
from penstock.model.walk import watching
from penstock.training.async_updates import StageUpdates
from penstock.training.build_replicas import require_rows
from penstock.training.loop_status import LoopStatus
from penstock.training.loss_checks import LossChecks
from penstock.training.micro_batches import scored
from penstock.training.pipeline_parts import PipelineParts, Step
from penstock.training.replica_versions import losses_of, total_of_replicas

Batch = list[list[Job]]  # the micro-batches of a mini-batch, as each stage executor here has them
KEEP = 512  # mini-batches of the longest run whose times are kept whole


class AsyncPipeline(PipelineParts, Protocol):
    """The parts of a Pipeline that asynchronous training needs."""

    @property
    def checks(self) -> LossChecks: ...


class AsyncTrainer:
    """Trains a pipeline without a flush; holds the mini-batches in flight and the records not yet taken."""

    def __init__(
        self,
        pipe: AsyncPipeline,
        executor: Executor,
        weights: VersionedWeights,
        updates: StageUpdates,
        status: LoopStatus,
        clock: Clock | None,
        first: int,
    ) -> None:
        self.pipe, self.executor, self.weights, self.updates = pipe, executor, weights, updates
        self.status, self.clock = status, clock
        self.first = first  # mini-batches that are trained one by one, with a flush: PipeMare's T3
        self.endless: LoweredLoop = weights.endless
        self.divided = updates.replicas is not None and not self.endless.shape.turns  # rows, over replicas
        self.passes = 0
        self.batches: dict[int, Batch] = {}  # in flight, by their number in the run
        self.fed = 0
        self.finished: deque[Step] = deque()
        self.flowing = self.draining = False
        self.before: list[torch.Tensor | None] = []
        self.watching = watching()
        self.loop: object = None  # identifies the user's loop that is running
        self.late: BaseException | None = None  # the error of leaving a loop, raised by the next call
        self.norms: dict[int, float] = {}  # of all gradients, as agreed on in the last drain

    def train(self, batches: Iterator[tuple[Any, Any]]) -> Iterator[Step]:
        """Yield one record a mini-batch, in order, until the loader ends or the pipeline switches its schedule."""
        self.drain()
        self.finished.clear()
        loop = self.loop = object()
        try:
            while self.pipe.async_trainer is self and self._goes_on(batches):
                yield from self._out(loop)
            self.drain()
            yield from self._out(loop)
        except GeneratorExit:
            if sys.is_finalizing():  # the script ended inside the loop, and torch is being shut down
                raise
            try:
                self._leave(loop)
            except LeftAlone as error:  # the error that ended the loop on this rank comes first
                error.__suppress_context__ = True  # its context is the GeneratorExit
                self.late = error
            except BaseException as error:  # Python only prints it when a loop is left by `break`
                self.late = error
                raise
            raise
        except BaseException:
            if self.pipe.ranks.alone:  # on several ranks all end, as the failure watch tells them
                self._leave(loop)
            raise

    def step(self, inputs: Any, target: Any) -> Step:
        """Train on one mini-batch by itself, as synchronous training does: its norm is that of all gradients."""
        self.drain()
        self._alone(inputs, target)
        return self.finished.pop()  # earlier records stay for the loop that this was called in

    def drain(self) -> None:
        """Train all mini-batches in flight to their end; all weights are then the newest."""
        late, self.late = self.late, None
        if late is not None:
            raise late
        if not self.flowing:
            return
        with self._guarded():
            with self.status.leaving(self.fed):
                self._require_same_end()
            self.weights.total = self.fed * self.endless.shape.microbatches
            self.draining = True
            self.executor.run([self.endless.rest(slot, self.passes, self.fed) for slot in self.executor.slots])
            self._agree()
        self._clocked()
        self._finish(self.fed)
        self._stop()

    def _goes_on(self, batches: Iterator[tuple[Any, Any]]) -> bool:
        """Train until the next record; return False when there is none."""
        if self.pipe.index < self.updates.since + self.first:
            batch = next(batches, None)
            if batch is not None:
                self._alone(*batch)
            return batch is not None
        if not self._take_in(batches):
            return False
        self._one_pass()
        return True

    def _alone(self, inputs: Any, target: Any) -> None:
        self._take(inputs, target)
        self.updates.alone()
        self.drain()
        norm = self.norms.get(0)
        done = replace(self.finished.pop(), updated=norm is None or isfinite(norm), gradient_norm=norm)
        self.finished.append(done)

    def _leave(self, loop: object) -> None:
        if self.loop is loop:
            self.loop = None
            self.drain()

    def _caught_up(self, error: BaseException) -> bool:
        """Run the rows before the failed mini-batch; return whether all stages then have the same version."""
        failed, left = self.executor.remaining()
        if failed is None:
            return False
        number, weights = self._mini_batch_of(failed), self.weights
        if self.updates.replicas is not None:  # some have come to their reductions and some have not
            return False
        if not isinstance(error, Exception) or any(held.versions.newest > number for held in weights.every()):
            return False
        if not self.draining:
            for slot, rows in enumerate(left):
                rows += self.endless.rest(slot, self.passes + 1, self.fed)
        weights.total = number * self.endless.shape.microbatches
        earlier = [[row for row in rows if self._mini_batch_of(row) < number] for rows in left]
        try:
            with torch.enable_grad(), random_states_kept(self.pipe.device), self.pipe.norms, self.pipe.busy():
                self.executor.run(earlier)
                self.updates.forget_after(number)
                self._agree()
        except Exception:  # of an earlier mini-batch: the first error tells the user what is wrong
            return False
        self._finish(number)
        return True

    def _require_same_end(self) -> None:
        """Raise for ranks that leave their loops at different mini-batches."""
        ends = [int(part) for part in self.pipe.ranks.world.gather(str(self.fed).encode())]
        for rank, end in enumerate(ends):
            if end != ends[0]:
                raise InputError(
                    "ranks that end their training loops at the same mini-batch",
                    f"{ends[0]} taken in on rank 0 and {end} on rank {rank}",
                    "leave the loop, evaluate and save on every rank at the same record",
                )

    def _clocked(self) -> None:
        if self.clock is not None:
            whole = self.fed <= KEEP
            rows = sum(len(self.endless.rest(slot, 0, self.fed)) for slot in self.executor.slots) if whole else -1
            self.clock.finish(self.fed, rows)

    def _out(self, loop: object) -> Iterator[Step]:
        while self.finished:
            yield self.finished.popleft()
            if self.loop is not loop:
                raise InputError(
                    "one loop over pipe.train at a time",
                    "another that was begun inside it",
                    "leave the first one before",
                )

    def _take_in(self, batches: Iterator[tuple[Any, Any]]) -> bool:
        """Take the mini-batches that the next pass needs from the loader; return False when it ends."""
        while self.fed < self.endless.fed(self.passes + 1):
            batch = next(batches, None)
            if batch is None:
                return False
            self._take(*batch)
        return True

    def _take(self, inputs: Any, target: Any) -> None:
        pipe = self.pipe
        inputs, target = pipe.feed.one(inputs, target)
        asked = pipe.checks.every_batch(pipe.require_loss(), inputs, target, self.flowing)
        if not self.flowing:
            pipe.checks.first_batch(pipe.require_loss(), inputs, target)
        batch = self._jobs(inputs, target, pipe.index + len(self.batches), self.fed * pipe.microbatches)
        pipe.checks.ask(partial(self._scored_job, batch), inputs, target, asked)
        if not self.flowing:
            self._start()
        self.batches[self.fed] = batch
        self.fed += 1
        self.status.took_in(self.fed)
        self.executor.add(batch)

    def _jobs(self, inputs: Any, target: Any, step: int, first_number: int) -> Batch:
        """Return the micro-batches of a mini-batch, numbered from `first_number` on. Replicas that take turns have the
        same ones; else each has its part of each."""
        pipe, shape = self.pipe, self.endless.shape
        if not self.divided:
            return [pipe.mini_batch(inputs, target, step, first_number)] * len(self.executor.parts)
        require_rows(shape, rows_of(as_call(inputs), target))
        slots, finish = self.executor.slots, scored(pipe.require_loss())
        places = [(shape.replicas[shape.slot_rank[slot]], int(shape.slot_replica[slot])) for slot in slots]
        alike = len(set(shape.replicas)) == 1
        with torch.enable_grad():
            parts = (inputs, target, pipe.microbatches, finish, step)
            return pipe.micro_batches.by_replica(*parts, places, alike, first_number)

    def _scored_job(self, batch: Batch, microbatch: int, replica: int) -> Job | None:
        """Return a micro-batch on a replica of the last stage, if this process has it."""
        if not self.divided:
            return batch[0][microbatch]
        slot = self.endless.shape.slot(self.endless.shape.stages - 1, replica)
        return batch[self.executor.slots.index(slot)][microbatch] if slot in self.executor.slots else None

    def _one_pass(self) -> None:
        rows = [self.endless.one(slot, self.passes) for slot in self.executor.slots]
        if self.passes == 0:
            rows = [self.endless.fill(slot) + more for slot, more in zip(self.executor.slots, rows, strict=True)]
        with self._guarded():
            self.executor.run(rows)
        self.passes += 1
        self._finish(self.passes * self.endless.loop.period)

    def _finish(self, until: int) -> None:
        """Make records of the mini-batches below a number, which this rank has done and others soon will have."""
        for number in sorted(self.batches):
            if number < until:
                batch = self.batches.pop(number)
                loss = self.updates.losses.pop(number, None) or total_of_replicas(losses_of(batch[0]))
                self.pipe.norms.move_by(batch[0][0].step)
                self.executor.remove(batch)
                self.finished.append(Step(self.pipe.index, loss.mean))
                self.pipe.index += 1

    def _start(self) -> None:
        pipe = self.pipe
        self.before = [parameter.grad for parameter in pipe.optimizers.parameters]
        for parameter in pipe.optimizers.parameters:
            parameter.grad = None
        self.kept = pipe.buffers.save()
        self.flowing, self.draining, self.passes, self.fed = True, False, 0, 0
        self.watching.__enter__()  # once for all passes, as entering it takes as long as a small stage
        self.updates.begin()
        self.executor.begin([])
        self.weights.begin()
        if self.clock is not None:
            self.clock.forget()

    def _stop(self) -> None:
        if self.flowing:
            self.watching.__exit__()
        for parameter, gradient in zip(self.pipe.optimizers.parameters, self.before, strict=True):
            parameter.grad = gradient
        self.flowing, self.passes, self.fed, self.before = False, 0, 0, []
        self.batches.clear()

    def _agree(self) -> None:
        """Share norms and overflows, which only single stages have, with all ranks at the end of a run."""
        ranks, optimizers = self.pipe.ranks, self.pipe.optimizers
        self.norms = {}
        if self.updates.agreeing:
            self.norms = self._last_norms()
            self.updates.settle(self.executor.stages.stages, self.norms)
        self.weights.end()
        if optimizers.fp16:
            overflows = json.dumps([*self.updates.overflows.values()]).encode()
            self.updates.rescale(scale for part in ranks.world.gather(overflows) for scale in json.loads(part))
            optimizers.scale, optimizers.good = ranks.broadcast([optimizers.scale, optimizers.good])

    def _last_norms(self) -> dict[int, float]:
        """Return the norms of the mini-batches whose updates are waiting, on every rank."""
        ranks, updates = self.pipe.ranks, self.updates
        if updates.replicas is None:
            norms = ranks.broadcast([*updates.norms.items()], ranks.placement[0])
            return {int(mini_batch): norm for mini_batch, norm in norms}
        squares: dict[int, dict[int, float]] = {}  # by version and stage
        for part in ranks.world.gather(json.dumps(updates.waiting_squares()).encode()):
            for version, stage, own in json.loads(part):
                squares.setdefault(version, {})[stage] = own
        # Added from the last stage to the first, as those that go along with backwards are.
        ordered = {version: sorted(by_stage.items(), reverse=True) for version, by_stage in squares.items()}
        return {version - 1: sqrt(sum(own for _, own in every)) for version, every in ordered.items()}

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Run rows with the user's random states kept; a run that fails is abandoned, see `_give_up`."""
        try:
            with torch.enable_grad(), random_states_kept(self.pipe.device), self.pipe.norms, self.pipe.busy():
                yield
        except BaseException as error:
            self._give_up(error)
            raise

    def _mini_batch_of(self, row: ActionRow) -> int:
        """Return the mini-batch of a row; an update makes the version after its mini-batch's."""
        return row.version - 1 if row.op > Op.RECV_B else row.microbatch // self.endless.shape.microbatches

    def _give_up(self, error: BaseException) -> None:
        """Abandon a run after an error.

        If no stage has an update yet, everything is as before the run. Otherwise all stages get the updates of the
        mini-batches before the failed one; where that is impossible, some have an update that others lack.
        """
        moved = any(held.versions.newest for held in self.weights.every())
        if not self.pipe.ranks.alone or (moved and not self._caught_up(error)):
            self.pipe.health.break_off(error, moved)
        if not moved:
            self.pipe.buffers.restore(self.kept)
        self.executor.drop()
        self.weights.begin()
        self._stop()
        self.loop = None
