"""All stages of a split in this process, and a mini-batch run through them as an engine would, every operation timed.

Stage after stage forward, then back, with another micro-batch in between: so each finds in the caches what it would
find there in a pipeline, which is hardly ever itself, and memory is handed out as there. Or one stage after the other,
each over the whole mini-batch: so a rank runs its only stage.
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
from penstock.profiler.laps import Laps

Read = dict[Any, float]  # seconds by operation, stage and micro-batch
SEEN = 3  # micro-batches that are run of a mini-batch: the first, whose gradients are new, and others
SEEN_ALONE = 5  # enough for some that run as most of a mini-batch do: a forward after a backward, and the other way


@dataclass(frozen=True)
class Batch:
    """A micro-batch, what makes a loss of the model's result for it, and how many such there are in a mini-batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    finish: Callable[[Any], Loss]
    count: int = 1


@dataclass(frozen=True)
class Run:
    """Mean seconds of a micro-batch, by operation and stage; and how uneven micro-batches were, see `_unevenness`."""

    seconds: dict[Op, FloatArray]
    unevenness: float


@dataclass(frozen=True)
class Kept:
    """Bytes that a stage keeps of a micro-batch: for its backward, and from its input gradient to its weight's."""

    activations: int
    until_weight: int


class Bench:
    """The stages of one split. Gradients are left in the parameters."""

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
        self.laps = Laps(settings.device)
        self.received: dict[int, Values] = {}  # by stage: what it was given last, to begin with
        self.given: dict[int, Values] = {}  # and to go back with

    def run(self, apart: bool, newest: bool = False, alone: bool = False) -> Run:
        """A mini-batch: F and B of each micro-batch on each stage, or F, I and W. `newest`: as where backwards are
        given newer weights than their forwards. `alone`: stage by stage."""
        self._clear()
        for stage, recipes in zip(self.stages, self.recipes, strict=True):
            stage.reweigh = recipes if newest else None
        seen = min(self.batch.count, SEEN_ALONE if alone else SEEN)
        if alone:
            self._one_by_one(seen, apart)
        else:
            self._in_flight(seen, apart)
        self.norms.forget()
        read, ops = self.laps.read(), (Op.F, Op.I, Op.W) if apart else (Op.F, Op.B)
        later = {op: _later(op, seen, alone) for op in ops}
        return Run({op: self._means(read, op, later[op]) for op in ops}, _unevenness(read, later))

    def renews(self) -> bool:
        """Whether backwards could be given newer weights; what the model does with its weights may not allow it."""
        try:
            self.run(apart=False, newest=True)
        except SplitError:
            self.laps.read()
            self.norms.forget()
            return False
        return True

    def weigh(self) -> list[Kept]:
        """Bytes that every stage keeps."""
        self._clear()
        heaps = [Heap((*self.split.model.parameters(), *self.split.model.buffers())) for _ in self.stages]
        late = [0] * len(self.stages)
        self._micro_batch(False, heaps)
        self._micro_batch(True, late=late)
        self.laps.read()
        self.norms.forget()
        return [Kept(heap.bytes, held) for heap, held in zip(heaps, late, strict=True)]

    def gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """What the last mini-batch has left for a parameter; of one that several stages use, one's part."""
        parts = (stage.parts[parameter] for stage in self.stages if parameter in stage.parts)
        return parameter.grad if parameter.grad is not None else next(parts, None)

    def _clear(self) -> None:
        for parameter in self.split.model.parameters():
            parameter.grad = None
        for stage in self.stages:
            stage.drop()

    def _in_flight(self, count: int, apart: bool) -> None:
        """So many micro-batches; each goes back when the next one has gone forward."""
        jobs = [self._job(part) for part in range(count)]
        for before, job in zip((None, *jobs), (*jobs, None), strict=True):
            if job is not None:
                self._forwards(job, apart)
            if before is not None:
                self._backwards(before, apart)

    def _one_by_one(self, count: int, apart: bool) -> None:
        """The same, one stage after the other, each with what it was given before."""
        if len(self.given) < len(self.stages):  # none has been all the way yet
            self._micro_batch(apart)
            self._clear()
            self.laps.read()
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
            work = partial(_weighed, work, heap, received)
        made, _ = self.laps.run((Op.F, stage.index, job.part), work)
        return made

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
        found = self.laps.run((Op.I if apart else Op.B, at, job.part), partial(stage.backward, job, given))
        if late is not None:
            late[at] = stage.queues[job.number].held_bytes
        if apart:
            self.laps.run((Op.W, at, job.part), partial(stage.weight_gradient, job))
        return found

    def _means(self, read: Read, op: Op, later: range) -> FloatArray:
        """Over a whole mini-batch: those that were not run are as the later ones that were."""
        stages = range(len(self.stages))
        first, *others = (np.array([read[op, at, part] for at in stages]) for part in (0, *later))
        rest = np.mean(others, axis=0) if others else first
        mean: FloatArray = (first + (self.batch.count - 1) * rest) / self.batch.count
        return mean


def _later(op: Op, seen: int, alone: bool) -> range:
    """The micro-batches that run as all but the first of a mini-batch do. Alone, the second forward still follows a
    forward, and the last backward a backward."""
    if not alone or seen < 3:
        return range(1, seen)
    return range(2, seen) if op is Op.F else range(1, seen - 1)


def _unevenness(read: Read, later: dict[Op, range]) -> float:
    """From the last of the later micro-batches but one to the last: the mean square of a deviation, as a share of that
    of the seconds. 0 where there are not two that are alike."""
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
    """What comes in may be written to."""
    return {value: tensor.clone() for value, tensor in values.items()}


def _weighed(work: Callable[[], Any], heap: Heap, received: Values) -> Any:
    """What comes in is kept, too; what goes out, the next stage keeps."""
    for tensor in received.values():
        heap.add(tensor)
    with heap.saving():
        return work()
