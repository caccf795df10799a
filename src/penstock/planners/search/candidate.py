"""A plan before it is simulated: all that the search decides, in a form that is cheap to change and to compare."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise

from penstock.core.plan import Plan, StagePlan
from penstock.planners.search.space import SearchMethod


class Mode(IntEnum):
    """The treatment of a stage's activations between forward and backward."""

    KEEP = 0
    RECOMPUTE = 1
    OFFLOAD = 2


@dataclass(frozen=True)
class Candidate:
    """Stage s has layers bounds[s] to bounds[s + 1] - 1; rank r has the next replicas[r] devices of the order."""

    method: SearchMethod
    times: int  # rows of a micro-batch, in units of the profile's
    steps: int  # micro-batches of a batch
    order: tuple[int, ...]  # devices, those left out first
    skip: int  # devices of the order that are left out
    bounds: tuple[int, ...]
    replicas: tuple[int, ...]
    modes: tuple[Mode, ...]  # of every stage

    @property
    def ranks(self) -> int:
        return len(self.replicas)

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage: in order, or back and forth for a V."""
        passes = (len(self.bounds) - 1) // self.ranks
        down = tuple(range(self.ranks))
        if self.method.folded:
            return down + down[::-1]
        return down * passes

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        ends = list(accumulate(self.replicas, initial=self.skip))
        return tuple(self.order[a:b] for a, b in pairwise(ends))

    def plan(self) -> Plan:
        stages = tuple(
            StagePlan(a, b - 1, mode is Mode.RECOMPUTE, mode is Mode.OFFLOAD)
            for (a, b), mode in zip(pairwise(self.bounds), self.modes, strict=True)
        )
        slots = tuple(tuple((device,) for device in rank) for rank in self.devices)
        return Plan(stages, self.placement, slots, self.method.schedule, self.steps, options=self.method.options)
