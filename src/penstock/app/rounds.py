"""Updates of one stage at a time, in training without a flush.

A round is a mini-batch's gradients on one stage; it makes one version. Under pipedream and pipemare a stage updates at
once, so clipping and the check for infinities see its own gradients alone: the last stage updates before the first has
its gradient. Under 2bw the version is first used two mini-batches later, so there is time to agree: squares of the
gradients go up with the backward, the norm of all comes down with the forward that first uses the version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite, sqrt

import torch
from torch import nn

from penstock.app.advance import advance, update
from penstock.app.gradients import Gradients, gradient_fault, rate_fault, refusal, values_of
from penstock.app.optimize import GROW_AFTER, Optimizers, require_scale
from penstock.core.shape import Law
from penstock.engine.tie_groups import TieMail
from penstock.engine.weights import Weights
from penstock.model.loss import Total
from penstock.model.stage import Job, Stage

KEPT = 4  # norms of rounds before: all that stages behind the first may still wait for, where a run is broken off
Rate = Callable[[int, int], float]  # of a stage, at an update: what its learning rate is multiplied with


@dataclass
class Round:
    """The gradients of one mini-batch on one stage, divided, and what they came from."""

    number: int
    step: int
    gradients: Gradients
    loss: float
    scale: float
    squares: float = 0.0


@dataclass(eq=False)
class Rounds:
    """What the optimizers of the stages here do, round by round."""

    optimizers: Optimizers
    weights: Weights
    mail: TieMail
    last: int  # stage
    rate: Rate | None = None
    since: int = 0  # mini-batches of the training before this schedule: T1 and T3 count from there
    waiting: dict[tuple[int, int], Round] = field(default_factory=dict)  # by stage and version
    norms: dict[int, float] = field(default_factory=dict)  # of all gradients, by round: the first stage knows
    overflows: dict[int, float] = field(default_factory=dict)  # scales, by stage
    open: dict[int, int] = field(default_factory=dict)  # by stage: the round whose gradients `.grad` holds
    aside: dict[tuple[int, int], tuple[Gradients, Gradients]] = field(default_factory=dict)  # of other rounds begun

    def __post_init__(self) -> None:
        self.measured = self.optimizers.clip is not None or self.optimizers.fp16
        self.begin()

    def begin(self) -> None:
        """A new run."""
        self.waiting, self.norms, self.overflows, self.open, self.aside = {}, {}, {}, {}, {}
        self.agreeing = self.measured and self.weights.endless.shape.law is Law.TWO_BW
        self.level = False

    def alone(self) -> None:
        """The run is one mini-batch, trained as synchronous training does: one norm for all, and no remedy."""
        self.agreeing, self.level, self.weights.level = self.measured, True, True

    def before(self, stage: Stage, job: Job, version: int) -> None:
        """A forward is about to run: what waits for its version is done now."""
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

    def gather(self, stage: Stage, job: Job) -> None:
        """Gradients are about to be made. Where weight gradients run late, a round begins before another has closed;
        what is not had late (of a norm, say) must not get into that."""
        number, begun = self._round(job), self.open.get(stage.index)
        if begun == number:
            return
        owned = self.optimizers.owned[stage.index]
        if begun is not None:
            self.aside[stage.index, begun] = {p: p.grad for p in owned if p.grad is not None}, stage.parts
        gradients, stage.parts = self.aside.pop((stage.index, number), ({}, {}))
        for parameter in owned:
            parameter.grad = gradients.get(parameter)
        self.open[stage.index] = number

    def close(self, stage: Stage, job: Job) -> None:
        """All gradients of a round are there."""
        number = self._round(job)
        del self.open[stage.index]
        found = _total(job.mates)
        self.mail.give(stage, number)
        gradients = {
            p: p.grad for p in self.optimizers.owned[stage.index] if p.grad is not None and p not in stage.parts
        }
        for parameter in gradients:
            parameter.grad = None
        gradients |= self.mail.take(stage, number)
        rest = found.weight * job.words.scale / job.batch_rows
        if gradients and rest != 1:
            torch._foreach_div_(list(gradients.values()), rest)
        mine = Round(number, job.step, gradients, found.mean, job.words.scale)
        if self.measured:
            mine.squares = _squares(gradients)
            job.words.squares += mine.squares
            if self.agreeing and stage.index == 0:
                self.norms[number] = sqrt(job.words.squares)
        self.waiting[stage.index, number + 1] = mine

    def update(self, stage: Stage, version: int) -> None:
        """The schedule wants a version: made now, or when its norm has been agreed on."""
        if not self.agreeing:
            mine = self.waiting.pop((stage.index, version))
            self._apply(stage, mine, sqrt(mine.squares))

    def forget_after(self, number: int) -> None:
        """The run ends before that round, of which some stages have gradients already."""
        self.waiting = {place: mine for place, mine in self.waiting.items() if mine.number < number}

    def rescale(self, overflows: Iterable[float]) -> None:
        """After a drain: overflows of which no forward came to tell, of all stages."""
        self.overflows = {}
        self._heard(functools.reduce(_least, overflows, 0.0))

    def settle(self, stages: dict[int, Stage], norms: dict[int, float]) -> None:
        """After a drain: what no forward came to ask for, with the norms that the first stage knows."""
        for (stage, version), mine in sorted(self.waiting.items(), key=lambda item: item[0][1]):
            self._apply(stages[stage], mine, norms[version - 1])
        self.waiting, self.norms = {}, {}

    def _round(self, job: Job) -> int:
        return job.number // self.weights.endless.shape.microbatches

    def _apply(self, stage: Stage, mine: Round, norm: float) -> None:
        usable = not self.measured or isfinite(norm)
        if not usable:
            self._refused(stage, mine, norm)
        elif self.optimizers.clip is not None and mine.gradients:
            every = [values_of(mine.gradients, parameter) for parameter in mine.gradients]
            torch._foreach_mul_(every, min(1.0, self.optimizers.clip / (norm + 1e-6)))
        if usable:
            self._require_finite(stage, mine)
        with self._rated(stage.index, mine.step), self.weights.updating(stage.index):
            if usable:
                self._step(stage.index, mine)
        scheduler = self.optimizers.by_stage.get(stage.index) if usable else None
        if scheduler is not None:
            advance(scheduler, mine.loss)
        if usable and self.optimizers.fp16 and stage.index == self.last:
            self.optimizers.good += 1
            if self.optimizers.good % GROW_AFTER == 0:
                self.optimizers.scale *= 2

    def _step(self, stage: int, mine: Round) -> None:
        optimizer = self.optimizers.optimizers.get(stage)
        if optimizer is None:
            return
        owned = self.optimizers.owned[stage]
        later = [parameter.grad for parameter in owned]  # of a round that has begun already
        for parameter in owned:
            parameter.grad = mine.gradients.get(parameter)
        try:
            update(optimizer)
        finally:
            for parameter, gradient in zip(owned, later, strict=True):
                parameter.grad = gradient

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

    def _refused(self, stage: Stage, mine: Round, norm: float) -> None:
        if not self.optimizers.fp16:
            raise refusal([gradient_fault(mine.gradients, self.optimizers.names, stage.index)], mine.step, norm)
        require_scale(mine.scale, mine.step)
        if not self.agreeing:
            self.overflows[stage.index] = _least(mine.scale, self.overflows.get(stage.index, 0.0))
        elif stage.index == self.last:
            self._heard(mine.scale)

    def _require_finite(self, stage: Stage, mine: Round) -> None:
        """Before anything of the update is applied. Other stages may have made theirs: nobody flushes here."""
        optimizer = self.optimizers.optimizers.get(stage.index)
        fault = {} if optimizer is None else rate_fault(optimizer, stage.index)
        if not fault and not self.measured:
            fault = gradient_fault(mine.gradients, self.optimizers.names, stage.index)
        if fault:
            raise refusal([fault], mine.step)

    def _heard(self, scale: float) -> None:
        """Gradients have overflowed under a scale. If it has come down since, nobody knows yet of the lower one."""
        if 0 < scale <= self.optimizers.scale:
            self.optimizers.scale, self.optimizers.good = self.optimizers.scale / 2, 0


def _least(one: float, other: float) -> float:
    """Of two scales; 0 where there is none."""
    return min(one, other) if one and other else one or other


def _squares(gradients: dict[nn.Parameter, torch.Tensor]) -> float:
    every = [values_of(gradients, parameter) for parameter in gradients]
    return sum(float(norm.double()) ** 2 for norm in torch._foreach_norm(every)) if every else 0.0


def _total(jobs: Sequence[Job]) -> Total:
    found = Total(sum(job.words.total for job in jobs), sum(job.words.weight for job in jobs))
    found.require_usable()
    return found
