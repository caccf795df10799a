"""The instance that `auto` searches over: one mini-batch, its costs and memory, as lists that Python reads fast.

Micro-batches are interchangeable, so on every stage forwards, input gradients and weight gradients may each run in
micro-batch order without loss: whatever a rank has done n of, the first n are ready no later. An *order* is therefore
only a list of codes for every rank; the n-th time a code appears it means micro-batch n. With S stages

    code s         forward of stage s
    code S + s     input gradient
    code 2S + s    weight gradient
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.core.cost import Costs, shares
from penstock.core.shape import Shape

Order = list[list[int]]
Send = tuple[int, int, float, float]  # lane, link (-1: none is occupied), seconds on the link, latency


@dataclass(frozen=True, eq=False)
class Instance:
    """One mini-batch to put in order. A lane carries tensors from one code to another, first in, first out."""

    stages: int
    ranks: int
    microbatches: int
    rank: list[int]  # of every stage
    owned: list[list[int]]  # stages of every rank, in model order
    seconds: list[float]  # by code
    needs: list[tuple[int, ...]]  # by code: lanes it takes one tensor from
    sends: list[tuple[Send, ...]]  # by code: what it puts on which lanes
    readers: list[int]  # by lane: the rank that waits for it
    lanes: int
    links: int
    grab: list[float]  # by code: memory taken when it starts
    drop: list[float]  # by code: change of memory when it ends
    cap: list[float]  # memory of every rank, tolerance included
    tail: list[float]  # by rank: seconds of update behind its last action

    @property
    def busiest(self) -> float:
        """Seconds of one micro-batch on the rank that has most to do."""
        return max(sum(self.seconds[s + k * self.stages] for s in owned for k in range(3)) for owned in self.owned)

    @property
    def squeezed(self) -> bool:
        """Whether several stages of a rank compete for a limited memory."""
        return self.stages > self.ranks and min(self.cap) < math.inf

    @property
    def actions(self) -> int:
        return 3 * self.microbatches * self.stages


def make_instance(shape: Shape, costs: Costs, cap: list[float]) -> Instance:
    """Return the instance of a shape under some costs.

    Times are exact where every rank has one slot and no two slots share a link. Elsewhere a rank is as slow as its
    slowest replica, the replicas of an edge send side by side, and contention between slots is left out. So is what
    holds up a slot that sends by itself.
    """
    stages = shape.stages
    lanes = 2 * len(shape.edges)
    needs: list[list[int]] = [[] for _ in range(3 * stages)]
    sends: list[list[Send]] = [[] for _ in range(3 * stages)]
    readers = [0] * lanes
    # The order of sends around an action is that of lowering: neighbours by stage, as the edges are listed.
    for edge, (a, b) in enumerate(shape.edges):
        for way, (source, target) in enumerate(((a, b), (stages + b, stages + a))):
            lane = 2 * edge + way
            needs[target].append(lane)
            sends[source].append((lane, *_carrier(shape, costs, edge, way)))
            readers[lane] = shape.placement[b if way == 0 else a]
    for stage in range(stages):
        if not sends[stage]:  # the loss: its input gradient follows its own forward
            needs[stages + stage].append(lanes)
            sends[stage].append((lanes, -1, 0.0, 0.0))
            readers.append(shape.placement[stage])
            lanes += 1
    grab, drop = _memory(shape, costs)
    return Instance(
        stages=stages,
        ranks=shape.ranks,
        microbatches=shape.microbatches,
        rank=list(shape.placement),
        owned=[list(shape.stages_of(rank)) for rank in range(shape.ranks)],
        seconds=_seconds(shape, costs),
        needs=[tuple(lane) for lane in needs],
        sends=[tuple(send) for send in sends],
        readers=readers,
        lanes=lanes,
        links=max(1, costs.links.resources),
        grab=grab,
        drop=drop,
        cap=[value + 1e-9 * (1.0 + value) if math.isfinite(value) else math.inf for value in cap],
        tail=_tail(shape, costs),
    )


def _slowest(shape: Shape, costs: Costs) -> np.ndarray:
    """Return the slowdown of every stage's slowest replica."""
    by_rank = np.zeros(shape.ranks)
    np.maximum.at(by_rank, shape.slot_rank, costs.slowdown)
    return by_rank[shape.stage_rank]


def _seconds(shape: Shape, costs: Costs) -> list[float]:
    share, slow = shares(shape), _slowest(shape, costs)
    again = np.where(costs.recompute, costs.forward, 0.0)
    parts = (costs.forward, costs.input_grad + again, costs.weight_grad)
    return [float(value) for part in parts for value in part * share * slow]


def _carrier(shape: Shape, costs: Costs, edge: int, way: int) -> tuple[int, float, float]:
    """Link, seconds and latency of an edge, one way: those of its slowest lane."""
    if shape.placement[shape.edges[edge][0]] == shape.placement[shape.edges[edge][1]]:
        return -1, 0.0, 0.0
    first, last = shape.neighbours.edge_lane[edge : edge + 2]
    links = costs.links
    lane = int(first) + int(np.argmax((links.seconds + links.latency)[way, first:last]))
    seconds = float(links.seconds[way, lane])
    return (int(links.leave[way, lane]) if seconds > 0 else -1), seconds, float(links.latency[way, lane])


def _memory(shape: Shape, costs: Costs) -> tuple[list[float], list[float]]:
    """Return the memory that every code takes at its start and changes at its end, by the rules of core.memory."""
    share, foot = shares(shape), costs.footprint
    full, late = foot.activations * share, foot.until_weight * share
    kept = np.where(costs.recompute, foot.inputs * share, full)
    nothing = np.zeros(shape.stages)
    grab = np.concatenate([kept, full - kept, nothing])
    drop = np.concatenate([nothing, late - full, -late])
    return [float(value) for value in grab], [float(value) for value in drop]


def _tail(shape: Shape, costs: Costs) -> list[float]:
    update = costs.update * _slowest(shape, costs)
    late = np.where(shape.stage_replicas > 1, costs.reduce, 0.0)
    return [sum(float(update[s] + late[s]) for s in shape.stages_of(rank)) for rank in range(shape.ranks)]
