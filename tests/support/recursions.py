"""Asynchronous pipeline training written out as plain recursions: what the numbers of an engine are compared with.

No pipeline runs here. Mini-batches are worked through one after the other, every version of every weight is kept, and
each micro-batch looks up the versions that its method names. That is enough, because a version depends only on the
mini-batches before it. Shares no code with the library.

Counting: `n` stages s = 0..n-1, `m` micro-batches a mini-batch, micro-batches t = 0, 1, ... over the whole run, so t
belongs to mini-batch t // m; the update of mini-batch b makes version b + 1. Stage s runs warm(s) = n-1-s forwards,
then a forward and a backward in turn. With n = 3 and m = 1 (F3: the forward of micro-batch 3; v1: version 1 made):

    stage 0   F0 F1 F2 B0 v1 F3 B1 v2 F4 B2 v3 ...     F3 finds version 1 = 3 - warm(0)
    stage 1   F0 F1 B0 v1 F2 B1 v2 F3 B2 v3 ...        F3 finds version 2 = 3 - warm(1)
    stage 2   F0 B0 v1 F1 B1 v2 F2 B2 v3 F3 ...        F3 finds version 3 = 3 - warm(2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, sqrt
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]
Carried = tuple[Any, ...]  # the tensor at work, then those that are carried along (residuals)
Place = tuple[int, int, str]  # stage, op of the stage, name of the op's weight

D = exp(-2)  # PipeMare's default


@dataclass(frozen=True)
class Op:
    """One operation, linear in its weights or without any. Ops that hold the same tensor object share the weight."""

    run: Callable[[Carried, Weights], Carried]
    weights: Weights = field(default_factory=dict)

    def backward(self, x: Carried, u: Weights, dy: Carried) -> tuple[Carried, Weights]:
        """Gradients of the input and of the weights, at the input `x` that the forward saved and at the weights `u`.

        An op that is linear in its weights keeps nothing of its forward's weights but the weights themselves: with
        other weights in their stead its backward gives just this.
        """
        inputs = [part.detach().requires_grad_() if part.is_floating_point() else part for part in x]
        leaves = {name: weight.detach().requires_grad_() for name, weight in u.items()}
        wanted = [part for part in inputs if part.requires_grad]
        found = iter(torch.autograd.grad(self.run(tuple(inputs), leaves), [*wanted, *leaves.values()], dy))
        dx = tuple(next(found) if part.requires_grad else None for part in inputs)
        return dx, dict(zip(leaves, found, strict=True))


@dataclass(frozen=True)
class SGD:
    """buf = mu * buf + g, beginning with buf = g; w -= lr * buf."""

    lr: float
    momentum: float = 0.0

    def step(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], scale: float = 1.0) -> Tensor:
        state["buf"] = self.momentum * state["buf"] + gradient if state else gradient
        return weight - self.lr * scale * state["buf"]


@dataclass(frozen=True)
class AdamW:
    """Adam with weight decay beside the gradient, not in it."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def step(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], scale: float = 1.0) -> Tensor:
        lr, (b1, b2), k = self.lr * scale, self.betas, state.get("k", 0) + 1
        mean = b1 * state.get("mean", torch.zeros_like(weight)) + (1 - b1) * gradient
        square = b2 * state.get("square", torch.zeros_like(weight)) + (1 - b2) * gradient**2
        state.update(k=k, mean=mean, square=square)
        return weight * (1 - lr * self.weight_decay) - lr * (mean / (1 - b1**k)) / (
            (square / (1 - b2**k)).sqrt() + self.eps
        )


@dataclass(frozen=True)
class Job:
    """What is trained on what. `loss(out, target)` is a mean over rows; a mini-batch of fewer than m rows has
    one row in each of its first micro-batches, and nothing in the rest."""

    stages: list[list[Op]]
    batches: list[tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    rule: SGD | AdamW
    m: int = 1
    clip: float | None = None
    predict: str | None = None  # "xpipe": the forward goes ahead by the last step, once for each version it lacks

    def __post_init__(self) -> None:
        if self.predict not in (None, "xpipe"):
            raise ValueError(f"predict is None or 'xpipe', not {self.predict!r}")

    def warm(self, stage: int) -> int:
        return len(self.stages) - 1 - stage

    def tau(self, stage: int) -> float:
        """How many updates lie between a forward and its backward, on average: tau_fwd - tau_bkwd, tau_bkwd = 0."""
        return self.warm(stage) / self.m

    @property
    def last(self) -> int:
        """The last micro-batch of the run."""
        return len(self.batches) * self.m - 1


@dataclass(frozen=True)
class Trained:
    """A loss per mini-batch, and all versions of each weight, under the place that owns it."""

    losses: list[float]
    history: dict[Place, list[Tensor]]

    @property
    def weights(self) -> dict[Place, Tensor]:
        return {place: versions[-1] for place, versions in self.history.items()}


@dataclass(frozen=True)
class Law:
    """What tells one method from another."""

    named: Callable[[int, int], int]  # (stage, micro-batch) -> the version that its forward uses
    newest: bool = False  # the backward takes the newest weights of its stage, not those of its forward
    together: bool = False  # one gradient norm for all stages, not one for each
    t1: float | None = None  # K of T1
    t2: float | None = None  # D of T2


def synchronous(job: Job) -> Trained:
    """No delay: every micro-batch uses the weights that all mini-batches before its own have made."""
    return train(job, Law(lambda stage, t: t // job.m, together=True))


def stashing(job: Job) -> Trained:
    """PipeDream: forward with the newest weights of the stage, backward with the same."""
    return train(job, Law(lambda stage, t: max(0, (t - job.warm(stage)) // job.m)))


def vertical_sync(job: Job) -> Trained:
    """PipeDream: every stage uses the version that the first stage used."""
    return train(job, Law(lambda stage, t: max(0, (t - job.warm(0)) // job.m)))


def no_stash(job: Job) -> Trained:
    """Forward with the newest weights of the stage, backward with the newest then: not a gradient of anything."""
    return train(job, Law(lambda stage, t: max(0, (t - job.warm(stage)) // job.m), newest=True))


def two_bw(job: Job) -> Trained:
    """PipeDream-2BW: one version behind on every stage, forward and backward."""
    return train(job, Law(lambda stage, t: max(0, t // job.m - 1), together=True))


def pipemare(job: Job, t1: float | None = None, t2: float | None = D) -> Trained:
    """PipeMare: as `no_stash`, backward corrected towards the forward's weights (T2), rates eased in (T1)."""
    return train(job, Law(lambda stage, t: max(0, (t - job.warm(stage)) // job.m), newest=True, t1=t1, t2=t2))


def train(job: Job, law: Law) -> Trained:
    """The loop of all methods. All mini-batches are trained to their end, so filling and draining need no rule."""
    versions = Versions(job, law)
    state: dict[Place, dict[str, Any]] = {place: {} for place in versions.history}
    losses = []
    for b, batch in enumerate(job.batches):
        loss, gradients = mini_batch(versions, b, *batch)
        losses.append(loss)
        for place, gradient in clipped(gradients, job.clip, law.together).items():
            newest = versions.history[place][b]
            rate = eased(job.tau(place[0]), b, law.t1)
            versions.history[place].append(job.rule.step(newest, gradient, state[place], rate))
    return Trained(losses, versions.history)


class Versions:
    """Every version of every weight, and which of them a micro-batch uses where."""

    def __init__(self, job: Job, law: Law) -> None:
        self.job, self.law = job, law
        self.history: dict[Place, list[Tensor]] = {}
        self.owner: dict[Place, Place] = {}  # a shared weight belongs to the first stage that uses it
        first: dict[int, Place] = {}
        for place, weight in places(job.stages):
            self.owner[place] = first.setdefault(id(weight), place)
            self.history.setdefault(self.owner[place], [weight.detach().clone()])

    def forward(self, place: Place, t: int) -> Tensor:
        """The version that the owner's forward of this micro-batch uses, or a forecast from it."""
        owner = self.owner[place]
        v = self.law.named(owner[0], t)
        weight, before = self.history[owner][v], self.history[owner][max(v - 1, 0)]
        missing = t // self.job.m - v if self.job.predict else 0
        return weight + missing * (weight - before)

    def backward(self, place: Place, t: int) -> Tensor:
        """The forward's weights; or, where nothing is stashed, the newest ones there, corrected where T2 is on."""
        if not self.law.newest:
            return self.forward(place, t)
        owner, stage = self.owner[place], place[0]
        v = self.newest(owner[0], stage, t)
        tau, weight = self.job.tau(stage), self.history[owner][v]
        if self.law.t2 is None or tau == 0:
            return weight
        return weight - tau * drift(self.history[owner][: v + 1], g=self.law.t2 ** (1 / tau))

    def newest(self, owner: int, stage: int, t: int) -> int:
        """The newest version on a stage when the backward of micro-batch t runs there.

        The owner has made one for each mini-batch before. Another stage got its copies with the data: it has what
        came with its last forward, that of micro-batch t + warm(stage).
        """
        if stage == owner:
            return t // self.job.m
        return self.law.named(owner, min(t + self.job.warm(stage), self.job.last))


def places(stages: list[list[Op]]) -> Iterator[tuple[Place, Tensor]]:
    for s, stage in enumerate(stages):
        for o, op in enumerate(stage):
            for name, weight in op.weights.items():
                yield (s, o, name), weight


def drift(versions: list[Tensor], g: float) -> Tensor:
    """T2's delta(t+1) = g * delta(t) + (1 - g) * (w(t+1) - w(t)), from delta = 0 through all these versions."""
    delta = torch.zeros_like(versions[0])
    for old, new in pairwise(versions):
        delta = g * delta + (1 - g) * (new - old)
    return delta


def eased(tau: float, k: int, rise: float | None) -> float:
    """T1's factor of the learning rate at update k: tau ** -(1 - min(k/K, 1)), tau at least 1."""
    return 1.0 if rise is None else max(tau, 1.0) ** -(1 - min(k / rise, 1))


def mini_batch(versions: Versions, b: int, x: Tensor, y: Tensor) -> tuple[float, dict[Place, Tensor]]:
    """Loss and gradients of a mini-batch, means over all its rows: each micro-batch counts by its rows."""
    m, rows, loss = versions.job.m, len(x), 0.0
    parts = min(m, rows)
    gradients = {place: torch.zeros_like(history[0]) for place, history in versions.history.items()}
    for part in range(parts):
        mine = slice(rows * part // parts, rows * (part + 1) // parts)
        share = len(x[mine]) / rows
        loss += micro_batch(versions, b * m + part, x[mine], y[mine], share, gradients)
    return loss, gradients


def micro_batch(
    versions: Versions, t: int, x: Tensor, y: Tensor, share: float, gradients: dict[Place, Tensor]
) -> float:
    """One forward through all ops and one backward; adds to the gradients, returns its share of the loss."""
    carried: Carried = (x,)
    saved = []
    for s, stage in enumerate(versions.job.stages):
        for o, op in enumerate(stage):
            saved.append((s, o, op, carried))
            carried = op.run(carried, {name: versions.forward((s, o, name), t) for name in op.weights})
    out = carried[0].detach().requires_grad_()
    loss = versions.job.loss(out, y) * share
    dy: Carried = torch.autograd.grad(loss, out)
    for s, o, op, carried in reversed(saved):
        dy, found = op.backward(carried, {name: versions.backward((s, o, name), t) for name in op.weights}, dy)
        for name, gradient in found.items():
            gradients[versions.owner[s, o, name]] += gradient
    return loss.item()


def clipped(gradients: dict[Place, Tensor], clip: float | None, together: bool) -> dict[Place, Tensor]:
    """Gradients scaled down to the norm `clip`, that of each stage or that of all; a shared weight is its owner's."""
    if clip is None:
        return gradients
    squares: dict[int, float] = {}
    for place, gradient in gradients.items():
        group = 0 if together else place[0]
        squares[group] = squares.get(group, 0.0) + gradient.square().sum().item()
    factor = {group: min(1.0, clip / (sqrt(square) + 1e-6)) for group, square in squares.items()}
    return {place: gradient * factor[0 if together else place[0]] for place, gradient in gradients.items()}
