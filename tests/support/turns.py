"""PipeDream with replicated stages written out as a plain recursion: mini-batches go to replicas in turn.

Shares no code with the library. With r[s] replicas on stage s and `workers` in all (docs: methods of PipeDream):

    warm(s)      forwards ahead = floor((workers - 1 - replicas of the stages before) / r[s])
    replica      of mini-batch k on stage s: k mod r[s]
    version      that mini-batch k uses there: max(0, floor(k / r[s]) - warm(s))
    update       mini-batches j*r .. j*r + r-1 are averaged into version j + 1; a last round averages those it has

With 2 replicas of the first stage and 1 of the second (workers = 3, warm = 1, 0):

    stage 0   k = 0 1 2 3 4 5 6 7   uses 0 0 0 0 1 1 2 2   makes 1 of (0, 1), 2 of (2, 3), ...
    stage 1   k = 0 1 2 3 4 5 6 7   uses 0 1 2 3 4 5 6 7   makes 1 of 0, 2 of 1, ...
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import recursions as R
from recursion_models import Model
from recursions import Law, Place
from segments import Batches, Rule


def warm_up(replicas: list[int]) -> list[int]:
    """Mini-batches that each stage runs ahead of its first backward."""
    return [(sum(replicas) - 1 - sum(replicas[:stage])) // count for stage, count in enumerate(replicas)]


def replica_of(replicas: list[int], stage: int, k: int) -> int:
    return k % replicas[stage]


def version_of(replicas: list[int], stage: int, k: int) -> int:
    return max(0, k // replicas[stage] - warm_up(replicas)[stage])


class Turns(R.Versions):
    """Trains the ops of a model, run by run: a run, from its fill to its drain, counts mini-batches and versions from
    0. `vertical`: every stage uses the version that holds the mini-batches which the first stage's version held."""

    def __init__(
        self,
        model: Model,
        replicas: list[int],
        rule: Rule,
        m: int = 1,
        clip: float | None = None,
        vertical: bool = False,
    ) -> None:
        self.model, self.replicas, self.rule, self.clip, self.m = model, replicas, rule, clip, m
        self.vertical = vertical
        super().__init__(R.Job(model.stages, [], model.loss, rule, m), Law(self._named))
        self.state: dict[Place, dict[str, Any]] = {place: {} for place in self.history}
        self.base: dict[Place, int] = dict.fromkeys(self.history, 0)  # version 0 of the run under way

    def run(self, batches: Batches) -> list[float]:
        """From the fill to the drain; returns the losses."""
        self.job = replace(self.job, batches=batches)
        self.base = {place: len(versions) - 1 for place, versions in self.history.items()}
        rounds: dict[int, list[dict[Place, Tensor]]] = {stage: [] for stage in range(len(self.replicas))}
        losses = []
        for k, (x, y) in enumerate(batches):
            loss, gradients = R.mini_batch(self, k, x, y)
            losses.append(loss)
            for stage, members in rounds.items():
                members.append({place: g for place, g in gradients.items() if place[0] == stage})
                if len(members) == self.replicas[stage] or k == len(batches) - 1:
                    self._update(members)
                    rounds[stage] = []
        return losses

    def loss_of(self, batch: tuple[Any, Any]) -> float:
        """The loss of a mini-batch by the newest weights."""
        carried: R.Carried = (batch[0],)
        for s, stage in enumerate(self.job.stages):
            for o, op in enumerate(stage):
                carried = op.run(carried, {name: self.history[self.owner[s, o, name]][-1] for name in op.weights})
        return self.job.loss(carried[0], batch[1]).item()

    def forward(self, place: Place, t: int) -> Tensor:
        owner = self.owner[place]
        return self.history[owner][self.base[owner] + self.law.named(owner[0], t)]

    def weights(self) -> dict[str, Tensor]:
        return self.model.named({place: versions[-1] for place, versions in self.history.items()})

    def _named(self, stage: int, t: int) -> int:
        k = t // self.m
        if self.vertical:  # counted in mini-batches, and rounded down to whole rounds here
            return version_of(self.replicas, 0, k) * self.replicas[0] // self.replicas[stage]
        return version_of(self.replicas, stage, k)

    def _update(self, members: list[dict[Place, Tensor]]) -> None:
        average = {place: torch.stack([one[place] for one in members]).mean(0) for place in members[0]}
        for place, gradient in R.clipped(average, self.clip, together=False).items():
            newest = self.history[place][-1]
            self.history[place].append(self.rule.step(newest, gradient, self.state[place]))
