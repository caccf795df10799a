"""Run a mini-batch through all stages of a split in this process, as an engine would, and time every operation.

Stages run forward one after another, then backward, with another micro-batch in between: so caches and the allocator
are in a state as in a pipeline. Or one stage after another runs the whole mini-batch, as a rank runs its only stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.core.action import Op
from penstock.core.links import FloatArray
from penstock.errors import SplitError
from penstock.model.batchnorm import DeferredNorms
from penstock.model.buffers import Buffers
from penstock.model.heap import Heap
from penstock.model.loss import Loss
from penstock.model.reweigh import Reweigh
from penstock.model.split import Split
from penstock.model.stage import Job, Settings, Stage, Values
from penstock.profiler.work_timer import WorkTimer

Read = dict[Any, float]  # seconds by operation, stage and micro-batch
SEEN = 3  # micro-batches of a mini-batch that are run: the first, whose gradients are new, and others
SEEN_ALONE = 5  # enough for some to run as most do: a forward after a backward, a backward after a forward


@dataclass(frozen=True)
class Batch:
    """A micro-batch, the function that turns the model's result into a loss, and the number of micro-batches."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    finish: Callable[[Any], Loss]
    count: int = 1


@dataclass(frozen=True)
class BenchRun:
    """Mean seconds of a micro-batch by operation and stage, and the unevenness of micro-batches (see `_unevenness`)."""

    seconds: dict[Op, FloatArray]
    unevenness: float


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that a stage keeps of a micro-batch: until its backward, and from its input gradient to its weight
    gradient."""

    activations: int
    until_weight: int


class Bench:
    """The stages of one split, to be timed. Gradients are left in the parameters."""

    def __init__(self, split: Split, batch: Batch, settings: Settings, norms: DeferredNorms) -> None:
        named, ties, buffers = dict(split.model.named_parameters()), split.ties(), Buffers(split.model)
        shared = [[named[name] for name, users in ties.items() if at in users] for at in range(split.pieces)]
        self.stages = [
            Stage(split, at, settings, norms, buffers, split.used(at), shared[at]) for at in range(split.pieces)
        ]
        self.split, self.batch, self.norms = split, batch, norms
        self.path = split.first
        names = {parameter: name for name, parameter in named.items()}
        self.recipes = [
            Reweigh([(names[p], p) for p in stage.parameters], constants=split.model.buffers()) for stage in self.stages
        ]
        self.timer = WorkTimer(settings.device)
        self.received: dict[int, Values] = {}  # by stage, its last inputs
        self.given: dict[int, Values] = {}  # by stage, its last gradients

    def run(self, apart: bool, renewed: bool = False, alone: bool = False) -> BenchRun:
        """Run a mini-batch: F and B of each micro-batch on each stage, or F, I and W. `renewed`: backwards get newer
        weights than their forwards. `alone`: stage by stage."""
        self._clear()
        for stage, recipes in zip(self.stages, self.recipes, strict=True):
            stage.reweigh = recipes if renewed else None
        count = min(self.batch.count, SEEN_ALONE if alone else SEEN)
        if alone:
            self._stage_by_stage(count, apart)
        else:
            self._interleaved(count, apart)
        self.norms.forget()
        read, ops = self.timer.read(), (Op.F, Op.I, Op.W) if apart else (Op.F, Op.B)
        later = {op: _later(op, count, alone) for op in ops}
        return BenchRun({op: self._means(read, op, later[op]) for op in ops}, _unevenness(read, later))

    def can_renew_weights(self) -> bool:
        """Whether backwards can get newer weights than their forwards. The model's use of its weights may not allow
        it."""
        try:
            self.run(apart=False, renewed=True)
        except SplitError:
            self.timer.read()
            self.norms.forget()
            return False
        return True

    def kept_bytes(self) -> list[KeptBytes]:
        """Return the bytes that every stage keeps."""
        self._clear()
        heaps = [Heap((*self.split.model.parameters(), *self.split.model.buffers())) for _ in self.stages]
        late = [0] * len(self.stages)
        self._micro_batch(False, heaps)
        self._micro_batch(True, late=late)
        self.timer.read()
        self.norms.forget()
        return [KeptBytes(heap.bytes, held) for heap, held in zip(heaps, late, strict=True)]

    def gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the last mini-batch's gradient of a parameter; of one that several stages use, one stage's part."""
        parts = (stage.parts[parameter] for stage in self.stages if parameter in stage.parts)
        return parameter.grad if parameter.grad is not None else next(parts, None)

    def _clear(self) -> None:
        for parameter in self.split.model.parameters():
            parameter.grad = None
        for stage in self.stages:
            stage.drop()

    def _interleaved(self, count: int, apart: bool) -> None:
        """Run `count` micro-batches; each runs backward after the next one has run forward."""
        jobs = [self._job(part) for part in range(count)]
        for before, job in zip((None, *jobs), (*jobs, None), strict=True):
            if job is not None:
                self._forwards(job, apart)
            if before is not None:
                self._backwards(before, apart)

    def _stage_by_stage(self, count: int, apart: bool) -> None:
        """Run `count` micro-batches on one stage after another, with the inputs of an earlier run."""
        if len(self.given) < len(self.stages):  # no micro-batch has passed all stages yet
            self._micro_batch(apart)
            self._clear()
            self.timer.read()
        jobs = [self._job(part) for part in range(count)]
        for stage in self.stages:
            for before, job in zip((None, *jobs), (*jobs, None), strict=True):
                if job is not None:
                    self._forward(stage, job, _copies(self.received[stage.index]), apart)
                if before is not None:
                    self._backward(stage, before, _copies(self.given[stage.index]), apart)

    def _micro_batch(self, apart: bool, heaps: list[Heap] | None = None, late: list[int] | None = None) -> None:
        job = self._job(0)
        self._forwards(job, apart, heaps)
        self._backwards(job, apart, late)

    def _job(self, part: int) -> Job:
        batch = self.batch
        return Job(part, 0, batch.args, batch.kwargs, batch.rows, self.path, batch.finish, part=part)

    def _forwards(self, job: Job, apart: bool, heaps: list[Heap] | None = None) -> None:
        values: Values = {}
        for stage in self.stages:
            received = {value: values[value] for value in self.path.incoming[stage.index]}
            self.received[stage.index] = received
            values.update(self._forward(stage, job, received, apart, None if heaps is None else heaps[stage.index]))

    def _forward(self, stage: Stage, job: Job, received: Values, apart: bool, heap: Heap | None = None) -> Values:
        work = partial(stage.forward, job, received, apart)
        if heap is not None:
            work = partial(_record_kept, work, heap, received)
        outputs, _ = self.timer.run((Op.F, stage.index, job.part), work)
        return outputs

    def _backwards(self, job: Job, apart: bool, late: list[int] | None = None) -> None:
        gradients: Values = {}
        for stage in reversed(self.stages):
            at = stage.index
            given = {value: gradients.pop(value) for value in self.path.outgoing[at] if value in gradients}
            self.given[at] = given
            for value, gradient in self._backward(stage, job, given, apart, late).items():
                gradients[value] = gradients[value] + gradient if value in gradients else gradient

    def _backward(self, stage: Stage, job: Job, given: Values, apart: bool, late: list[int] | None = None) -> Values:
        at = stage.index
        gradients = self.timer.run((Op.I if apart else Op.B, at, job.part), partial(stage.backward, job, given))
        if late is not None:
            late[at] = stage.queues[job.number].held_bytes
        if apart:
            self.timer.run((Op.W, at, job.part), partial(stage.weight_gradient, job))
        return gradients

    def _means(self, read: Read, op: Op, later: range) -> FloatArray:
        """Return the means over a whole mini-batch. Micro-batches that were not run count as the later ones that
        were."""
        stages = range(len(self.stages))
        first, *others = (np.array([read[op, at, part] for at in stages]) for part in (0, *later))
        rest = np.mean(others, axis=0) if others else first
        mean: FloatArray = (first + (self.batch.count - 1) * rest) / self.batch.count
        return mean


def _later(op: Op, count: int, alone: bool) -> range:
    """Return the micro-batches that run as all but the first of a mini-batch. Stage by stage, the second forward still
    follows a forward, and the last backward a backward."""
    if not alone or count < 3:
        return range(1, count)
    return range(2, count) if op is Op.F else range(1, count - 1)


def _unevenness(read: Read, later: dict[Op, range]) -> float:
    """Return the mean square deviation between the last two comparable micro-batches, relative to the mean square of
    their seconds. 0 where there are not two."""
    pairs = [
        (seconds, read[op, at, part - 1])
        for (op, at, part), seconds in read.items()
        if len(later[op]) > 1 and part == later[op][-1]
    ]
    if not pairs:
        return 0.0
    both = np.array(pairs)
    apart, square = both[:, 0] - both[:, 1], both.mean(axis=1) ** 2
    return float((apart**2).sum() / 2 / max(square.sum(), 1e-24))


def _copies(values: Values) -> Values:
    """Return copies of a stage's inputs, which it may overwrite."""
    return {value: tensor.clone() for value, tensor in values.items()}


def _record_kept(work: Callable[[], Any], heap: Heap, received: Values) -> Any:
    """Run a stage and record the bytes that it keeps, its inputs included. Its outputs are counted by the next
    stage."""
    for tensor in received.values():
        heap.add(tensor)
    with heap.saving():
        return work()
