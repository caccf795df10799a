"""Updates of asynchronous training: one stage at a time, without a flush.

The gradients of one mini-batch on one stage make one version. Under pipedream and pipemare a stage updates at once,
before earlier stages have their gradients, so clipping and the check for infinities see its own gradients alone. Under
2bw a version is first used two mini-batches later, so the stages can agree: squares of gradients are sent with the
backwards, and the norm of all with the forward that first uses the version.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any

import torch
from torch import nn

from penstock.core.shape import Law
from penstock.engine.weights.select import VersionedWeights
from penstock.engine.weights.ties import TiedWeights
from penstock.model.loss import Loss, Total
from penstock.model.stage import Job, Stage
from penstock.training.finite_gradients import Gradients, gradient_fault, rate_fault, refusal, values_of
from penstock.training.replica_versions import ReplicaGradients, ReplicaVersions, losses_of, usable
from penstock.training.stage_optimizers import Optimizers, require_scale

KEPT = 4  # norms of earlier mini-batches that later stages may still wait for where a run is abandoned
Place = tuple[int, int]  # a stage and a replica of it
Rate = Callable[[int, int], float]  # the factor of a stage's learning rate at an update


@dataclass
class StageGradients:
    """Gradients of one mini-batch on one stage, divided by their weight, with its loss and fp16 scale; where replicas
    take turns, the average of a round, of which `mini_batch` is the last."""

    mini_batch: int
    step: int
    gradients: Gradients
    loss: float
    scale: float
    squares: float = 0.0


@dataclass(eq=False)
class StageUpdates:
    """Updates each stage here once its gradients of a mini-batch are complete, or agreed on by all stages."""

    optimizers: Optimizers
    weights: VersionedWeights
    ties: TiedWeights
    last: int  # stage
    rate: Rate | None = None
    replicas: ReplicaVersions | None = None  # where a stage has several
    since: int = 0  # mini-batches of the training before this schedule: T1 and T3 count from there
    waiting: dict[tuple[int, int], StageGradients] = field(default_factory=dict)  # by stage and version
    norms: dict[int, float] = field(default_factory=dict)  # of all gradients, by mini-batch; on the first stage
    overflows: dict[int, float] = field(default_factory=dict)  # scales, by stage
    open: dict[Place, int] = field(default_factory=dict)  # the mini-batch whose gradients `.grad` holds
    aside: dict[tuple[Place, int], tuple[Gradients, Gradients]] = field(default_factory=dict)  # of other mini-batches
    micro_batches: Counter[tuple[Place, int]] = field(default_factory=Counter)  # done, of a mini-batch
    squares: dict[tuple[int, int], float] = field(default_factory=dict)  # with replicas, by stage and mini-batch
    losses: dict[int, Total] = field(default_factory=dict)  # of mini-batches whose losses replicas have exchanged

    def __post_init__(self) -> None:
        self.measured = self.optimizers.clip is not None or self.optimizers.fp16
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self.waiting, self.norms, self.overflows, self.open, self.aside = {}, {}, {}, {}, {}
        self.micro_batches.clear()
        self.losses.clear()
        self.squares.clear()
        self.ties.forget()
        if self.replicas is not None:
            self.replicas.forget()
        self.agreeing = self.measured and self.weights.endless.shape.law is Law.TWO_BW
        self.level = False

    def alone(self) -> None:
        """Train this run's single mini-batch synchronously: one norm for all stages, no staleness mitigation."""
        self.agreeing, self.level, self.weights.level = self.measured, True, True

    def before_forward(self, stage: Stage, job: Job, version: int) -> None:
        """Make the update that a forward's version waits for."""
        words, first = job.words, job.part == 0
        if stage.index == 0 and first:
            words.agreed = self.norms.get(version - 1, words.agreed)
            self.norms = {number: norm for number, norm in self.norms.items() if number >= version - 1 - KEPT}
        if (stage.index, version) in self.waiting:
            self._apply(stage, self.waiting.pop((stage.index, version)), words.agreed)
        if first:  # all micro-batches of a mini-batch have one scale
            words.overflow = _least(words.overflow, self.overflows.pop(stage.index, 0.0))
        if stage.index == self.last:
            if first:
                self._overflowed(words.overflow)
            words.scale = self.optimizers.scale
            job.root = words.scale / job.batch_rows

    def after_forward(self, stage: Stage, job: Job, result: Any) -> None:
        """Note the loss, which is sent with the backward."""
        if not (stage.last and job.rows):
            return
        assert isinstance(result, Loss)
        loss = Total(result.total, float(result.weight))
        job.words.losses[0 if job.share is None else job.share.replica] = loss
        if loss.weight:  # a micro-batch may have nothing to score; the mini-batch is checked at its end
            loss.require_usable()

    def before_backward(self, stage: Stage, job: Job) -> None:
        """Have `.grad` hold the gradients of this mini-batch alone.

        Where weight gradients run late, one mini-batch begins before another is complete.
        """
        place = stage.index, stage.replica
        number, begun = self._mini_batch(job), self.open.get(place)
        if begun == number:
            return
        if self.replicas is not None and self.agreeing and number > 0 and job.part == 0:
            self._send_squares(stage, job)
        owned = self.optimizers.owned[stage.index]
        if begun is not None:
            self.aside[place, begun] = {p: p.grad for p in owned if p.grad is not None}, stage.parts
        gradients, stage.parts = self.aside.pop((place, number), ({}, {}))
        for parameter in owned:
            parameter.grad = gradients.get(parameter)
        self.open[place] = number

    def _send_squares(self, stage: Stage, job: Job) -> None:
        """Send the squares of the mini-batch before along with the first backward of this one: replicas add gradients
        only after the backward that completes them."""
        before = self._mini_batch(job) - 1
        job.words.squares += self.squares[stage.index, before]
        self.squares.pop((stage.index, before - KEPT), None)
        if stage.index == 0:
            self.norms[before] = sqrt(job.words.squares)

    def after_backward(self, stage: Stage, job: Job) -> None:
        """Count a micro-batch's gradients; after the last, those of the mini-batch are complete."""
        place = (stage.index, stage.replica), self._mini_batch(job)
        self.micro_batches[place] += 1
        if self.micro_batches[place] == self.weights.endless.shape.microbatches:
            del self.micro_batches[place]
            self._complete(stage, job)

    def _complete(self, stage: Stage, job: Job) -> None:
        """Divide the gradients of a mini-batch by their weight; they wait for their update."""
        number = self._mini_batch(job)
        del self.open[stage.index, stage.replica]
        if self.replicas is not None and self.replicas.have(stage):
            self._put_share(self.replicas, stage, job)
            return
        loss = usable(losses_of(job.mates))
        self.ties.send_gradients(stage, number, dense=True)
        gradients = {
            p: p.grad for p in self.optimizers.owned[stage.index] if p.grad is not None and p not in stage.parts
        }
        for parameter in gradients:
            parameter.grad = None
        gradients |= self.ties.collect_gradients(stage, number, dense=True)
        weight = loss.weight * job.words.scale / job.batch_rows
        if gradients and weight != 1:
            torch._foreach_div_(list(gradients.values()), weight)
        complete = StageGradients(number, job.step, gradients, loss.mean, job.words.scale)
        if self.measured:
            complete.squares = _squares(gradients)
        if self.measured and self.replicas is None:
            job.words.squares += complete.squares
            if self.agreeing and stage.index == 0:
                self.norms[number] = sqrt(job.words.squares)
        self.waiting[stage.index, number + 1] = complete

    def _put_share(self, replicas: ReplicaVersions, stage: Stage, job: Job) -> None:
        """Keep a replica's gradients of a mini-batch for the reduction; in turns, divided by their weight."""
        number, scale = self._mini_batch(job), job.words.scale / job.batch_rows
        gradients, stage.parts = stage.parts, {}
        if self.weights.endless.shape.turns:
            weight, scale = usable(losses_of(job.mates)).weight * scale, 0.0
            if gradients and weight != 1:
                torch._foreach_div_(list(gradients.values()), weight)
        replicas.put(
            stage, self.weights.endless.version_of(stage.index, number), ReplicaGradients(gradients, job, scale)
        )

    def reduce(self, stage: Stage, version: int) -> None:
        """Begin to add the gradients that a stage's replicas have for a version."""
        assert self.replicas is not None
        self.replicas.start(stage, version)

    def update(self, stage: Stage, version: int) -> bool | None:
        """Make a version of a stage's weights now, unless it waits until its norm is agreed on.

        Replicas in one process share it: the first makes it, when all have given their gradients.
        """
        if self.replicas is not None and self.replicas.have(stage):
            if not self.replicas.sums.ready(stage, version):
                return False
            if self.replicas.sums.was_taken(stage, version):
                return None
            self.waiting[stage.index, version] = self._joined(self.replicas, stage, version)
        if not self.agreeing:
            complete = self.waiting.pop((stage.index, version))
            self._apply(stage, complete, sqrt(complete.squares))
        elif self.replicas is not None:
            self.squares[stage.index, version - 1] = self.waiting[stage.index, version].squares
        return None

    def _joined(self, replicas: ReplicaVersions, stage: Stage, version: int) -> StageGradients:
        joined = replicas.take(stage, version, functools.partial(self._tied, stage, version - 1))
        for notify in self.weights.observers.reduced:
            notify(stage.index, replicas.sums.ended)
        self.losses.update(zip(joined.mini_batches, joined.losses, strict=True))
        complete = StageGradients(joined.mini_batches[-1], joined.step, joined.gradients, joined.mean, 1.0)
        complete.squares = _squares(joined.gradients) if self.measured else 0.0
        return complete

    def _tied(self, stage: Stage, number: int, gradients: Gradients) -> Gradients:
        """Send the gradients of weights that other stages own, and add theirs of weights that this one owns."""
        if not self.ties.groups:
            return gradients
        stage.parts = {p: gradients.pop(p) for group in self.ties.groups for p in group.parameters if p in gradients}
        self.ties.send_gradients(stage, number, dense=True)
        return gradients | self.ties.collect_gradients(stage, number, dense=True)

    def forget_after(self, number: int) -> None:
        """Drop the gradients of a mini-batch and later ones, before which the run ends."""
        self.waiting = {place: one for place, one in self.waiting.items() if one.mini_batch < number}

    def rescale(self, overflows: Iterable[float]) -> None:
        """After a drain, take in the overflows of all stages that no forward has carried to the last one."""
        self.overflows = {}
        self._overflowed(functools.reduce(_least, overflows, 0.0))

    def waiting_squares(self) -> list[tuple[int, int, float]]:
        """Return version, stage and squares of the gradients of every update here that waits."""
        return [(version, stage, complete.squares) for (stage, version), complete in self.waiting.items()]

    def settle(self, stages: dict[int, Stage], norms: dict[int, float]) -> None:
        """After a drain, make the updates that no forward has asked for, with the norms of the first stage."""
        for (stage, version), complete in sorted(self.waiting.items(), key=lambda item: item[0][1]):
            self._apply(stages[stage], complete, norms[version - 1])
        self.waiting, self.norms = {}, {}

    def _mini_batch(self, job: Job) -> int:
        return job.number // self.weights.endless.shape.microbatches

    def _apply(self, stage: Stage, complete: StageGradients, norm: float) -> None:
        usable = not self.measured or isfinite(norm)
        if not usable:
            self._refuse_or_shrink(stage, complete, norm)
        elif self.optimizers.clip is not None and complete.gradients:
            values = [values_of(complete.gradients, parameter) for parameter in complete.gradients]
            torch._foreach_mul_(values, min(1.0, self.optimizers.clip / (norm + 1e-6)))
        if usable:
            self._require_finite(stage, complete)
        with self._rated(stage.index, complete.step), self.weights.updating(stage.index):
            if usable:
                self.optimizers.step(stage.index, complete.gradients)
        if usable:
            self.optimizers.advance(stage.index, complete.loss)
        if usable and self.optimizers.fp16 and stage.index == self.last:
            self.optimizers.grow()

    @contextmanager
    def _rated(self, stage: int, step: int) -> Iterator[None]:
        """Apply PipeMare's T1 to the learning rate for this update and its forecast; schedulers see the user's rate."""
        optimizer = self.optimizers.optimizers.get(stage)
        factor = 1.0 if self.rate is None or self.level else self.rate(stage, step - self.since)
        if factor == 1.0 or optimizer is None:
            yield
            return
        before = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = rate

    def _refuse_or_shrink(self, stage: Stage, complete: StageGradients, norm: float) -> None:
        if not self.optimizers.fp16:
            raise refusal([gradient_fault(complete.gradients, self.optimizers.names, stage.index)], complete.step, norm)
        require_scale(complete.scale, complete.step)
        if not self.agreeing:
            self.overflows[stage.index] = _least(complete.scale, self.overflows.get(stage.index, 0.0))
        elif stage.index == self.last:
            self._overflowed(complete.scale)

    def _require_finite(self, stage: Stage, complete: StageGradients) -> None:
        """Raise for a fault before the update is applied. Other stages may already have made theirs."""
        optimizer = self.optimizers.optimizers.get(stage.index)
        fault = {} if optimizer is None else rate_fault(optimizer, stage.index)
        if not fault and not self.measured:
            fault = gradient_fault(complete.gradients, self.optimizers.names, stage.index)
        if fault:
            raise refusal([fault], complete.step)

    def _overflowed(self, scale: float) -> None:
        """Halve the scale after an overflow under it, unless it has been lowered since."""
        if 0 < scale <= self.optimizers.scale:
            self.optimizers.shrink()


def _least(one: float, other: float) -> float:
    """Return the smaller of two scales, of which 0 means none."""
    return min(one, other) if one and other else one or other


def _squares(gradients: dict[nn.Parameter, torch.Tensor]) -> float:
    every = [values_of(gradients, parameter) for parameter in gradients]
    return sum(float(norm.double()) ** 2 for norm in torch._foreach_norm(every)) if every else 0.0
