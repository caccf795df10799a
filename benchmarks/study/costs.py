"""Predicted seconds and memory of every method, from the simulator.

One second is the forward of a mini-batch through a sixteenth of the model; its input gradient and its weight gradient
take one each; sending it over a boundary takes a tenth. A micro-batch of a share of the rows costs that share. Memory
is in units of the whole model's weights, of all kinds together on the fullest rank; the activations of a mini-batch in
the whole model are taken to be as large as its weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from benchmarks.study.methods import METHODS
from benchmarks.study.tasks import PIECES
from penstock import schedule
from penstock.core.cost import Costs, Footprint, flat_costs
from penstock.core.shape import Shape
from penstock.core.timeline import Timeline
from penstock.simulator.simulate import simulate_costs

TRANSFER = 0.1
SYNCHRONOUS = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v")
LONG = 3  # times the stages: mini-batches of a run that is seen steady


@dataclass(frozen=True)
class Cost:
    schedule: str
    microbatches: int
    fill: float  # seconds before the first mini-batch counts
    seconds: float  # a mini-batch
    flowing: float  # the same if no step of a synchronous schedule waited for the last rank of the one before
    versions: float  # of the weights, on the rank that has most
    activations: float  # of mini-batches through a stage, on the rank that has most
    memory: float

    def at(self, batches: float) -> float:
        return self.fill + self.seconds * batches


def method_cost(name: str, stages: int) -> Cost:
    """What a method costs; of synchronous ones, the quickest that fits into 2bw's memory."""
    method = METHODS[name]
    if name.startswith("synchronous"):
        return synchronous(stages, asynchronous("2bw", stages, stages).memory)
    vertical = bool(method.options.get("vertical_sync"))
    found = asynchronous(method.schedule, stages, max(1, method.times * stages), vertical)
    copies = 0  # that the simulator does not know of
    if method.options.get("t2", method.schedule == "pipemare"):
        copies += 2  # T2's delta, and the corrected weights
    if "predict" in method.options:  # the last step; a forecast from the newest version, under 2bw from both
        copies += 3 if method.schedule == "2bw" else 2
    return replace(found, memory=found.memory + copies / stages, versions=found.versions + copies)


def synchronous(stages: int, memory: float = np.inf) -> Cost:
    """The quickest synchronous schedule of at most 4p micro-batches that needs no more memory."""
    every = [one_step(name, stages, times * stages) for name in SYNCHRONOUS for times in (1, 2, 4)]
    return min((cost for cost in every if cost.memory <= memory), key=lambda cost: (cost.seconds, cost.memory))


@cache
def one_step(name: str, stages: int, parts: int) -> Cost:
    ends = []
    for steps in (1, 2, 3):
        built = schedule(name, stages=stages, microbatches=parts, batches=steps)
        line = simulate_costs(built, costs(built.shape, parts))
        ends.append(line.makespan)
    return Cost(name, parts, 0.0, round(ends[0], 6), round(ends[2] - ends[1], 6), *_held(line))


@cache
def asynchronous(name: str, stages: int, parts: int, vertical: bool = False) -> Cost:
    options = {"vertical_sync": True} if vertical else {}
    ends = []
    for batches in (LONG * stages, 2 * LONG * stages):
        built = schedule(name, stages=stages, microbatches=parts, batches=batches, **options)
        line = simulate_costs(built, costs(built.shape, parts))
        ends.append(line.makespan)
    seconds = round((ends[1] - ends[0]) / (LONG * stages), 6)  # without the noise of long sums
    return Cost(name, parts, ends[0] - seconds * LONG * stages, seconds, seconds, *_held(line))


def costs(shape: Shape, parts: int) -> Costs:
    work = PIECES / shape.ranks / parts  # seconds of a rank's forward of one micro-batch
    flat = flat_costs(shape, forward=work, input_grad=work, weight_grad=work, transfer=TRANSFER / parts)
    foot = flat.footprint
    weights = np.full(shape.stages, 1.0 / shape.stages)
    scaled = Footprint(
        foot.activations / shape.ranks / parts,
        foot.until_weight / shape.ranks / parts,
        foot.inputs,
        weights,
        weights,  # gradients
        2 * weights,  # Adam's two
    )
    return replace(flat, footprint=scaled)


def _held(line: Timeline) -> tuple[float, float, float]:
    ranks = line.schedule.shape.ranks
    assert line.memory is not None
    peak = float(line.memory.peak(line.schedule).max())
    return float(line.weight_versions.max()), float(line.peak_activations.max()) * ranks, peak
