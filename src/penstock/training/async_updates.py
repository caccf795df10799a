"""Updates of asynchronous training: one stage at a time, without a flush.

The gradients of one mini-batch on one stage make one version. Under pipedream and pipemare a stage updates at
once, so clipping and the check for infinities see its own gradients alone: the last stage updates before the first has
its gradient. Under 2bw the version is first used two mini-batches later, so there is time to agree: squares of the
gradients go up with the backward, the norm of all comes down with the forward that first uses the version.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from penstock.training.stage_optimizers import Optimizers, require_scale

KEPT = 4  # norms of mini-batches before: all that stages behind the first may still wait for, where a run is broken off
Rate = Callable[[int, int], float]  # of a stage, at an update: what its learning rate is multiplied with


@dataclass
class StageGradients:
    """The gradients of one mini-batch on one stage, divided, and what they came from."""

    mini_batch: int
    step: int
    gradients: Gradients
    loss: float
    scale: float
    squares: float = 0.0


@dataclass(eq=False)
class StageUpdates:
    """Updates each stage here when its gradients of a mini-batch are there, or have been agreed upon."""

    optimizers: Optimizers
    weights: VersionedWeights
    ties: TiedWeights
    last: int  # stage
    rate: Rate | None = None
    since: int = 0  # mini-batches of the training before this schedule: T1 and T3 count from there
    waiting: dict[tuple[int, int], StageGradients] = field(default_factory=dict)  # by stage and version
    norms: dict[int, float] = field(default_factory=dict)  # of all gradients, by mini-batch: the first stage knows
    overflows: dict[int, float] = field(default_factory=dict)  # scales, by stage
    open: dict[int, int] = field(default_factory=dict)  # by stage: the mini-batch whose gradients `.grad` holds
    aside: dict[tuple[int, int], tuple[Gradients, Gradients]] = field(default_factory=dict)  # of others that have begun
    micro_batches: Counter[tuple[int, int]] = field(default_factory=Counter)  # done, by stage and mini-batch

    def __post_init__(self) -> None:
        self.measured = self.optimizers.clip is not None or self.optimizers.fp16
        self.begin()

    def begin(self) -> None:
        """A new run."""
        self.waiting, self.norms, self.overflows, self.open, self.aside = {}, {}, {}, {}, {}
        self.micro_batches.clear()
        self.ties.forget()
        self.agreeing = self.measured and self.weights.endless.shape.law is Law.TWO_BW
        self.level = False

    def alone(self) -> None:
        """The run is one mini-batch, trained as synchronous training does: one norm for all, and no remedy."""
        self.agreeing, self.level, self.weights.level = self.measured, True, True

    def before_forward(self, stage: Stage, job: Job, version: int) -> None:
        """Make the update that a forward's version waits for."""
        words, first = job.words, job.part == 0
        if stage.index == 0 and first:
            words.agreed = self.norms.get(version - 1, words.agreed)
            self.norms = {number: norm for number, norm in self.norms.items() if number >= version - 1 - KEPT}
        if (stage.index, version) in self.waiting:
            self._apply(stage, self.waiting.pop((stage.index, version)), words.agreed)
        if first:  # all of a mini-batch go by one scale
            words.overflow = _least(words.overflow, self.overflows.pop(stage.index, 0.0))
        if stage.index == self.last:
            if first:
                self._heard(words.overflow)
            words.scale = self.optimizers.scale
            job.root = words.scale / job.batch_rows

    def after_forward(self, stage: Stage, job: Job, result: Any) -> None:
        """Note the loss, which travels up with the backward."""
        if not (stage.last and job.rows):
            return
        assert isinstance(result, Loss)
        job.words.total, job.words.weight = result.total, float(result.weight)
        if job.words.weight:  # a micro-batch may have nothing to score; the mini-batch is looked at when it is over
            Total(job.words.total, job.words.weight).require_usable()

    def before_backward(self, stage: Stage, job: Job) -> None:
        """Have `.grad` hold the gradients of this mini-batch alone. Where weight gradients run late, one begins before
        another is complete."""
        number, begun = self._mini_batch(job), self.open.get(stage.index)
        if begun == number:
            return
        owned = self.optimizers.owned[stage.index]
        if begun is not None:
            self.aside[stage.index, begun] = {p: p.grad for p in owned if p.grad is not None}, stage.parts
        gradients, stage.parts = self.aside.pop((stage.index, number), ({}, {}))
        for parameter in owned:
            parameter.grad = gradients.get(parameter)
        self.open[stage.index] = number

    def after_backward(self, stage: Stage, job: Job) -> None:
        """Count a micro-batch's gradients; the last of a mini-batch complete them."""
        place = (stage.index, self._mini_batch(job))
        self.micro_batches[place] += 1
        if self.micro_batches[place] == self.weights.endless.shape.microbatches:
            del self.micro_batches[place]
            self._complete(stage, job)

    def _complete(self, stage: Stage, job: Job) -> None:
        """Divide the gradients of a mini-batch, and have them wait for their update."""
        number = self._mini_batch(job)
        del self.open[stage.index]
        loss = _total(job.mates)
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
            job.words.squares += complete.squares
            if self.agreeing and stage.index == 0:
                self.norms[number] = sqrt(job.words.squares)
        self.waiting[stage.index, number + 1] = complete

    def reduce(self, stage: Stage, version: int) -> None:
        """Without a flush there are no replicas, so far."""
        raise AssertionError("replicas of an asynchronous schedule are refused when it is read")

    def update(self, stage: Stage, version: int) -> None:
        """The schedule wants a version: made now, or when its norm has been agreed on."""
        if not self.agreeing:
            complete = self.waiting.pop((stage.index, version))
            self._apply(stage, complete, sqrt(complete.squares))

    def forget_after(self, number: int) -> None:
        """The run ends before that mini-batch, of which some stages have gradients already."""
        self.waiting = {place: one for place, one in self.waiting.items() if one.mini_batch < number}

    def rescale(self, overflows: Iterable[float]) -> None:
        """After a drain: overflows of which no forward came to tell, of all stages."""
        self.overflows = {}
        self._heard(functools.reduce(_least, overflows, 0.0))

    def settle(self, stages: dict[int, Stage], norms: dict[int, float]) -> None:
        """After a drain: what no forward came to ask for, with the norms that the first stage knows."""
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
        """PipeMare's T1, for this update and what is forecast from it: schedulers see the rate that the user asked
        for."""
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
            self._heard(complete.scale)

    def _require_finite(self, stage: Stage, complete: StageGradients) -> None:
        """Before anything of the update is applied. Other stages may have made theirs: nobody flushes here."""
        optimizer = self.optimizers.optimizers.get(stage.index)
        fault = {} if optimizer is None else rate_fault(optimizer, stage.index)
        if not fault and not self.measured:
            fault = gradient_fault(complete.gradients, self.optimizers.names, stage.index)
        if fault:
            raise refusal([fault], complete.step)

    def _heard(self, scale: float) -> None:
        """Gradients have overflowed under a scale. If it has come down since, nobody knows yet of the lower one."""
        if 0 < scale <= self.optimizers.scale:
            self.optimizers.shrink()


def _least(one: float, other: float) -> float:
    """Of two scales; 0 where there is none."""
    return min(one, other) if one and other else one or other


def _squares(gradients: dict[nn.Parameter, torch.Tensor]) -> float:
    every = [values_of(gradients, parameter) for parameter in gradients]
    return sum(float(norm.double()) ** 2 for norm in torch._foreach_norm(every)) if every else 0.0


def _total(jobs: Sequence[Job]) -> Total:
    total = Total(sum(job.words.total for job in jobs), sum(job.words.weight for job in jobs))
    total.require_usable()
    return total
