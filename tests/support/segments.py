"""The recursions for a pipe that is drained and filled again, and the engine's run of the same, ready to be compared.

Shares no code with the library's engine. All versions of a weight stay in one list; a run, from its fill to its drain,
calls the newest of them version 0. What a method carries from one run into the next (the optimizer's state, T2's delta,
the last step) is then simply what the list says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import penstock
import recursions as R
from recursion_models import Model
from recursions import AdamW, Law, Place

Batches = list[tuple[Any, Any]]
Rule = R.SGD | AdamW

SGD, MOMENTUM, ADAMW = R.SGD(0.05), R.SGD(0.03, 0.9), AdamW(0.01, weight_decay=0.1)
WITHIN = 1e-10
SYNCHRONOUS = ("1f1b", "gpipe")


@dataclass(frozen=True)
class Method:
    """A way to train, as the engine is asked for it and as the recursions say it."""

    schedule: str
    m: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def law(self, n: int) -> Law:
        m, options = self.m, self.options
        if self.schedule == "2bw":
            return Law(lambda s, t: max(0, t // m - 1), together=True)
        if options.get("vertical_sync"):
            return Law(lambda s, t: max(0, (t - (n - 1)) // m))
        newest = self.schedule == "pipemare" or not options.get("stash", True)
        decay = options.get("t2", True) if self.schedule == "pipemare" else None
        return Law(
            lambda s, t: max(0, (t - (n - 1 - s)) // m),
            newest=newest,
            t1=options.get("t1"),
            t2=R.D if decay is True else decay or None,
        )

    def __str__(self) -> str:
        return " ".join([self.schedule, f"m={self.m}", *(f"{name}={value}" for name, value in self.options.items())])


def optimizer(rule: Rule) -> Callable[[Any], torch.optim.Optimizer]:
    """torch's own, for the same rule."""
    if isinstance(rule, AdamW):
        return lambda params: torch.optim.AdamW(params, lr=rule.lr, weight_decay=rule.weight_decay)
    return lambda params: torch.optim.SGD(params, lr=rule.lr, momentum=rule.momentum)


class Recursion(R.Versions):
    """Trains the ops of a model, run by run. `decay`: what the learning rate is multiplied with after each update."""

    def __init__(self, model: Model, method: Method, rule: Rule, clip: float | None = None, decay: float = 1.0) -> None:
        self.model, self.rule, self.clip, self.decay = model, rule, clip, decay
        super().__init__(R.Job(model.stages, [(torch.ones(99), None)], model.loss, rule), Law(lambda s, t: 0))
        self.state: dict[Place, dict[str, Any]] = {place: {} for place in self.history}
        self.steps: dict[Place, list[Tensor | None]] = {place: [None] for place in self.history}
        self.updates = 0
        self.switch(method)

    def switch(self, method: Method) -> None:
        """Go on by another method: it knows of no drift and no step yet."""
        self.method, self.law = method, method.law(len(self.model.stages))
        self.since = self.base = self.updates
        self.deltas: dict[tuple[Place, float], list[Tensor]] = {}

    def run(self, batches: Batches) -> list[float]:
        """From the fill to the drain."""
        if self.method.schedule in SYNCHRONOUS:
            return [self.step(batch) for batch in batches]
        self.base, losses = self.updates, []
        if batches:
            self.job = replace(self.job, batches=batches, m=self.method.m)
        for b, batch in enumerate(batches):
            loss, gradients = self._mini_batch(b, batch)
            losses.append(loss)
            self._update(gradients, self.law.together, self.law.t1)
        return losses

    def step(self, batch: tuple[Any, Any]) -> float:
        """One mini-batch by itself: synchronous, without any remedy."""
        self.base = self.updates
        self.job = replace(self.job, batches=[batch], m=self.method.m)
        law, self.law = self.law, Law(lambda s, t: 0, together=True)
        loss, gradients = R.mini_batch(self, 0, *batch)
        self._update(gradients, True, None)
        self.law = law
        return loss

    def weights(self) -> dict[str, Tensor]:
        return self.model.named({place: versions[-1] for place, versions in self.history.items()})

    def forward(self, place: Place, t: int) -> Tensor:
        owner = self.owner[place]
        v = self.law.named(owner[0], t)
        weight, predict = self.history[owner][self.base + v], self.method.options.get("predict")
        missing = t // self.job.m - v
        if predict is None or self.base + v == self.since:
            return weight
        if predict == "spectrain":
            return weight + missing * self.steps[owner][self.base + v]
        return weight + missing * (weight - self.history[owner][self.base + v - 1])

    def backward(self, place: Place, t: int) -> Tensor:
        if not self.law.newest:
            return self.forward(place, t)
        owner, stage = self.owner[place], place[0]
        at = self.base + self.newest(owner[0], stage, t)
        tau, weight = self.job.tau(stage), self.history[owner][at]
        if self.law.t2 is None or tau == 0:
            return weight
        return weight - tau * self._drift(owner, at, self.law.t2 ** (1 / tau))

    def _drift(self, owner: Place, at: int, g: float) -> Tensor:
        """T2's delta of a version; those before are kept."""
        versions, known = self.history[owner], self.deltas.setdefault((owner, g), [])
        if not known:
            known.append(torch.zeros_like(versions[0]))
        while len(known) <= at - self.since:
            v = self.since + len(known)
            known.append(g * known[-1] + (1 - g) * (versions[v] - versions[v - 1]))
        return known[at - self.since]

    def _mini_batch(self, b: int, batch: tuple[Any, Any]) -> tuple[float, dict[Place, Tensor]]:
        return R.mini_batch(self, b, *batch)

    def _update(self, gradients: dict[Place, Tensor], together: bool, t1: float | None) -> None:
        for place, gradient in R.clipped(gradients, self.clip, together).items():
            factor = self.decay**self.updates * R.eased(
                self.job.tau(place[0]), self.updates - self.method.options.get("t3", 0), t1
            )
            state = self.state[place]
            self.history[place].append(self.rule.step(self.history[place][-1], gradient, state, factor))
            self.steps[place].append(factor * momentum_step(self.rule, state))
        self.updates += 1


def momentum_step(rule: Rule, state: dict[str, Any]) -> Tensor:
    """SpecTrain's: -lr * buf; of Adam -lr * mhat / (sqrt(vhat) + eps)."""
    if isinstance(rule, R.SGD):
        return -rule.lr * state["buf"]
    (b1, b2), k = rule.betas, state["k"]
    return -rule.lr * (state["mean"] / (1 - b1**k)) / ((state["square"] / (1 - b2**k)).sqrt() + rule.eps)


def pipeline(model: Model, method: Method, rule: Rule, **more: Any) -> penstock.Pipeline:
    """The module of a model under an engine, cut as its ops are."""
    n = len(model.stages)
    given = {"stages": n, "cuts": [str(i) for i in range(1, n)], "verify": False, "optimizer": optimizer(rule)}
    given |= {"schedule": method.schedule, "microbatches": method.m, "loss": model.loss} | method.options | more
    return penstock.Pipeline(model.module, example=model.batches(1, 2)[0][0], **given)


def trained(pipe: penstock.Pipeline, batches: Batches) -> list[float]:
    return [step.loss for step in pipe.train(batches)]


def weights(pipe: penstock.Pipeline) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in pipe.model.named_parameters()}


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference; all names are in both."""
    assert found.keys() == wanted.keys()
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)
