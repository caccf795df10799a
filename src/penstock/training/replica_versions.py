"""Versions of stages with replicas, in training without a flush: whose gradients make one, and what goes along.

In turns, each replica has the mean gradient of a mini-batch of its own; a version is the average over the mini-batches
of a round, or over those that a last round has. Where replicas split micro-batches, their gradients are added and then
divided by the weight of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from penstock.core.shape import Shape
from penstock.errors import InputError
from penstock.model.batchnorm import DeferredNorms
from penstock.model.loss import Total
from penstock.model.stage import Job, Stage
from penstock.training.finite_gradients import Gradients
from penstock.training.replicas import note, scores
from penstock.training.version_sums import Facts, VersionSums

Losses = dict[int, tuple[float, float]]  # sum and divisor of a mini-batch, by replica of the last stage


@dataclass
class ReplicaGradients:
    """One replica's gradients of a mini-batch, and what it knows of that. `per_weight`: the sum over replicas is
    divided by the mini-batch's weight times this; 0 in turns, where each replica has divided its own."""

    gradients: Gradients
    job: Job
    per_weight: float


@dataclass
class Joined:
    """The gradients of a version, ready for its update, and the loss of every mini-batch in them."""

    mini_batches: list[int]
    step: int
    gradients: Gradients
    losses: list[Total]

    @property
    def mean(self) -> float:
        return sum(loss.mean for loss in self.losses) / len(self.losses)


@dataclass
class ReplicaVersions:
    """Joins what the replicas of a stage have of a version. `apart`: the replicas are in processes of their own."""

    shape: Shape
    sums: VersionSums
    norms: DeferredNorms
    apart: bool
    shares: dict[tuple[int, int, int], ReplicaGradients] = field(default_factory=dict)  # by stage, replica and version
    labelled: dict[tuple[int, int], Job] = field(default_factory=dict)  # by stage and version, one here

    def have(self, stage: Stage) -> bool:
        """Return whether a stage has replicas."""
        return self.sums.counts[stage.index] > 1

    def put(self, stage: Stage, version: int, share: ReplicaGradients) -> None:
        """Keep a replica's gradients until its REDUCE row."""
        self.shares[stage.index, stage.replica, version] = share

    def start(self, stage: Stage, version: int) -> None:
        """Begin to add what the replicas have. One without a mini-batch in a last round gives nothing."""
        share = self.shares.pop((stage.index, stage.replica, version), None)
        if share is None:
            self.sums.start(stage, version, {}, {})
            return
        self.labelled[stage.index, version] = share.job
        self.sums.start(stage, version, share.gradients, self._facts(stage, share))

    def take(self, stage: Stage, version: int, tie: Callable[[Gradients], Gradients]) -> Joined:
        """Return the gradients of a version. `tie` exchanges those of tied weights for what the stage owns."""
        gradients, every = self.sums.take(stage, version)
        gradients = tie(gradients)
        job = self.labelled.pop((stage.index, version), None)
        facts = [one for one in every if one]
        self._take_in(stage, facts, job)
        losses: dict[int, Losses] = {}
        for one in facts:
            own = {int(replica): (total, weight) for replica, (total, weight) in one["losses"].items()}
            losses.setdefault(one["mini_batch"], {}).update(own)
        numbers = sorted(losses)
        totals = [usable(losses[number]) for number in numbers]
        by = float(len(numbers)) if self.shape.turns else totals[0].weight * facts[0]["per_weight"]
        if gradients and by != 1:
            torch._foreach_div_(list(gradients.values()), by)
        return Joined(numbers, max(one["step"] for one in facts), gradients, totals)

    def forget(self) -> None:
        """Begin a new run."""
        self.shares.clear()
        self.labelled.clear()
        self.sums.forget()

    def _facts(self, stage: Stage, share: ReplicaGradients) -> Facts:
        job = share.job
        facts = {
            "mini_batch": job.number // self.shape.microbatches,
            "step": job.step,
            "losses": losses_of(job.mates),
            "per_weight": share.per_weight,
        }
        if self.apart:
            facts["norms"] = self.norms.statistics(job.step)
            if stage.last and not self.shape.turns and job.labels is not None:
                facts |= {"unit": job.labels.memory.unit, "scored": scores(job.labels)}
        return facts

    def _take_in(self, stage: Stage, facts: Sequence[Facts], job: Job | None) -> None:
        """Take in what other processes have found out about mini-batches."""
        for one in facts if self.apart else ():
            self.norms.take_in(one["step"], one["norms"], {stage.index})
            if job is not None and job.labels is not None and "scored" in one:
                note(job.labels, one["scored"])
        if len({one["unit"] for one in facts if one.get("unit")}) > 1:
            raise InputError(
                "labels of as many positions a row on every replica of the last stage",
                "other numbers on some",
                "return (sum, weight) from the loss, or give the last stage one replica",
            )


def losses_of(jobs: Sequence[Job]) -> Losses:
    """Return what is known of a mini-batch's loss, by replica of the last stage."""
    losses: Losses = {}
    for job in jobs:
        for replica, (total, weight) in job.words.losses.items():
            before = losses.get(replica, (0.0, 0.0))
            losses[replica] = before[0] + total, before[1] + weight
    return losses


def total_of_replicas(losses: Losses) -> Total:
    """Return the loss of a mini-batch, added in the order of the replicas."""
    ordered = [losses[replica] for replica in sorted(losses)]
    return Total(sum(total for total, _ in ordered), sum(weight for _, weight in ordered))


def usable(losses: Losses) -> Total:
    """Return the loss of a mini-batch by whose weight gradients can be divided."""
    total = total_of_replicas(losses)
    total.require_usable()
    return total
