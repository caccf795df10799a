"""Training without a flush, as a user sees it: mini-batches go in, and a record comes out when each is done.

Record k comes at the same point of the loop's body on every rank, so whoever leaves after it fixes the drain
everywhere: what was taken from the loader by then is trained to its end. An evaluation or a save in between drains too,
and the pipe fills again afterwards.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import Any, Protocol

import torch

from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow, LoweredLoop
from penstock.engine.executor import Executor
from penstock.engine.measure.clock import Clock
from penstock.engine.weights.select import VersionedWeights
from penstock.errors import InputError, LeftAlone
from penstock.model.loss import Total
from penstock.model.seeding import random_states_kept
from penstock.model.stage import Job
from penstock.model.walk import watching
from penstock.training.async_updates import StageUpdates
from penstock.training.loop_status import LoopStatus
from penstock.training.loss_checks import LossChecks
from penstock.training.pipeline_parts import PipelineParts, Step

Batch = list[Job]
KEEP = 512  # mini-batches of the longest run whose times are kept whole


class AsyncPipeline(PipelineParts, Protocol):
    """The parts of a Pipeline that asynchronous training needs."""

    @property
    def checks(self) -> LossChecks: ...


class AsyncTrainer:
    """The mini-batches in flight between one drain and the next, and those that have just come out."""

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
        self.passes = 0
        self.batches: dict[int, Batch] = {}  # in flight, by their number in the run
        self.fed = 0
        self.finished: deque[Step] = deque()
        self.flowing = self.draining = False
        self.before: list[torch.Tensor | None] = []
        self.watching = watching()
        self.loop: object = None  # whose loop is under way
        self.late: BaseException | None = None  # what went wrong when a loop was left, for whoever asks next
        self.norms: dict[int, float] = {}  # of all gradients, as far as they were agreed on in the last drain

    def train(self, batches: Iterator[tuple[Any, Any]]) -> Iterator[Step]:
        """One record a mini-batch, in order, until there is no more, or the pipeline goes on by another schedule."""
        self.drain()
        self.finished.clear()
        loop = self.loop = object()
        try:
            while self.pipe.async_trainer is self and self._goes_on(batches):
                yield from self._out(loop)
            self.drain()
            yield from self._out(loop)
        except GeneratorExit:
            if sys.is_finalizing():  # a loop that was never left: the script is over, and torch is being taken down
                raise
            try:
                self._leave(loop)
            except LeftAlone as error:  # what threw this rank out of its loop comes first
                error.__suppress_context__ = True  # which is Python's own way of leaving
                self.late = error
            except BaseException as error:  # which Python only prints when a loop is left by `break`
                self.late = error
                raise
            raise
        except BaseException:
            if self.pipe.crew.alone:  # other ranks may not know of it: they hear of it, and end
                self._leave(loop)
            raise

    def step(self, inputs: Any, target: Any) -> Step:
        """One mini-batch by itself, with what synchronous training does: its norm is that of all gradients."""
        self.drain()
        self._alone(inputs, target)
        return self.finished.pop()  # records of a loop that it was called in stay for that

    def drain(self) -> None:
        """Train to its end what is in flight; afterwards all weights are the newest, and nobody waits for anything."""
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
            self._meet()
        self._clocked()
        self._finish(self.fed)
        self._stop()

    def _goes_on(self, batches: Iterator[tuple[Any, Any]]) -> bool:
        """Train until the next record; False when there is no more."""
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
        """Whether all stages have come to one version: that of the mini-batches before the one that failed."""
        failed, left = self.executor.remaining()
        if failed is None:
            return False
        number, weights = self._mini_batch_of(failed), self.weights
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
                self._meet()
        except Exception:  # another one, of a mini-batch before: the first tells the user what is wrong
            return False
        self._finish(number)
        return True

    def _require_same_end(self) -> None:
        """Refuse ranks that leave their loops at different points."""
        ends = [int(part) for part in self.pipe.crew.world.gather(str(self.fed).encode())]
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
        """What the next pass needs; False when there is no more."""
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
        jobs = pipe.mini_batch(inputs, target, pipe.index + len(self.batches), self.fed * pipe.microbatches)
        pipe.checks.ask(jobs, inputs, target, asked)
        if not self.flowing:
            self._start()
        self.batches[self.fed] = jobs
        self.fed += 1
        self.status.took_in(self.fed)
        self.executor.stages.add(jobs)

    def _one_pass(self) -> None:
        rows = [self.endless.one(slot, self.passes) for slot in self.executor.slots]
        if self.passes == 0:
            rows = [self.endless.fill(slot) + more for slot, more in zip(self.executor.slots, rows, strict=True)]
        with self._guarded():
            self.executor.run(rows)
        self.passes += 1
        self._finish(self.passes * self.endless.loop.period)

    def _finish(self, until: int) -> None:
        """Mini-batches below that number are done: on this rank, and so before long on all."""
        for number in sorted(self.batches):
            if number < until:
                jobs = self.batches.pop(number)
                loss = Total(sum(job.words.total for job in jobs), sum(job.words.weight for job in jobs))
                self.pipe.norms.move_by(jobs[0].step)
                self.executor.stages.remove(jobs)
                self.finished.append(Step(self.pipe.index, loss.mean))
                self.pipe.index += 1

    def _start(self) -> None:
        pipe = self.pipe
        self.before = [parameter.grad for parameter in pipe.optimizers.parameters]
        for parameter in pipe.optimizers.parameters:
            parameter.grad = None
        self.kept = pipe.buffers.save()
        self.flowing, self.draining, self.passes, self.fed = True, False, 0, 0
        self.watching.__enter__()  # once for all passes: entering it takes as long as a small stage
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

    def _meet(self) -> None:
        """What only one stage knows, at the end of a run, to all."""
        crew, optimizers = self.pipe.crew, self.pipe.optimizers
        self.norms = {}
        if self.updates.agreeing:
            norms = crew.told([*self.updates.norms.items()], crew.placement[0])
            self.norms = {int(mini_batch): norm for mini_batch, norm in norms}
            self.updates.settle(self.executor.stages.stages, self.norms)
        self.weights.end()
        if optimizers.fp16:
            overflows = json.dumps([*self.updates.overflows.values()]).encode()
            self.updates.rescale(scale for part in crew.world.gather(overflows) for scale in json.loads(part))
            optimizers.scale, optimizers.good = crew.tell([optimizers.scale, optimizers.good])

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around rows: with the user's random states kept; a run that fails is given up, with what is newest."""
        try:
            with torch.enable_grad(), random_states_kept(self.pipe.device), self.pipe.norms, self.pipe.busy():
                yield
        except BaseException as error:
            self._give_up(error)
            raise

    def _mini_batch_of(self, row: ActionRow) -> int:
        """Return whose row it is; an update makes the version behind its mini-batch's."""
        return row.version - 1 if row.op > Op.RECV_B else row.microbatch // self.endless.shape.microbatches

    def _give_up(self, error: BaseException) -> None:
        """Where no stage has an update yet, all is as it was; else all stages get those of the mini-batches before the
        one that failed. If that cannot be, some have an update that others lack."""
        moved = any(held.versions.newest for held in self.weights.every())
        if not self.pipe.crew.alone or (moved and not self._caught_up(error)):
            self.pipe.health.break_off(error, moved)
        if not moved:
            self.pipe.buffers.restore(self.kept)
        self.executor.drop()
        self.weights.begin()
        self._stop()
        self.loop = None
