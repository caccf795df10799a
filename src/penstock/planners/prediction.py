"""A plan with its simulated run: the result of `penstock.plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from penstock.core.action import Op
from penstock.core.cluster import Cluster
from penstock.core.cost import Costs
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.planners.outcome import PlanOutcome


@dataclass(frozen=True, eq=False)
class Prediction:
    """A plan with its simulated run. A step is one mini-batch: of an asynchronous plan, in the steady state.

    In the timeline each action takes its mean; `step_seconds` is the mean over steps whose actions are as uneven as the
    profile's.
    """

    outcome: PlanOutcome
    cluster: Cluster
    timeline: Timeline
    step_seconds: float

    @property
    def plan(self) -> Plan:
        return self.outcome.plan

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.outcome.profile.samples * self.plan.microbatches

    @property
    def throughput(self) -> float:
        """Rows a second."""
        return self.rows / self.step_seconds if self.step_seconds else float("inf")

    @cached_property
    def memory(self) -> dict[int, float]:
        """Peak bytes of every device that the plan uses."""
        memory = self.timeline.memory
        assert memory is not None  # a prediction has costs
        peaks = memory.peak(self.timeline.schedule)
        return {device: float(peak) for slot, peak in zip(self.plan.slots, peaks, strict=True) for device in slot}

    @property
    def over(self) -> dict[int, float]:
        """Bytes that each device is short of."""
        short = {device: held - self.cluster.devices[device].memory for device, held in self.memory.items()}
        return {device: missing for device, missing in short.items() if missing > 1e-6 * self.memory[device]}

    @cached_property
    def busy(self) -> list[tuple[float, str]]:
        """The largest shares of a step: (share, what), the largest first."""
        parts = [*self._computing(), *self._moving()]
        total = self.step_seconds or 1.0
        return sorted(((seconds / total, what) for seconds, what in parts), reverse=True)

    @cached_property
    def _costs(self) -> Costs:
        assert self.timeline.costs is not None  # as above
        return self.timeline.costs

    def _computing(self) -> Iterator[tuple[float, str]]:
        """Seconds of a step that each stage's replicas compute, and reduce."""
        shape, costs = self.timeline.schedule.shape, self._costs
        for s, at in enumerate(self.plan.placement):
            rank = self.plan.devices[at]
            slow = max(float(costs.slowdown[shape.slot(s, r)]) for r in range(len(rank)))
            work = costs.seconds(Op.F)[s] + costs.seconds(Op.B)[s]
            yield float(work) * slow * self.plan.microbatches / len(rank), f"the compute of stage {s}"
            rounds = len(rank) if shape.turns else 1  # replicas that take turns reduce once a round
            yield float(costs.reduce[s]) / rounds, f"the all-reduce of stage {s}"

    def _moving(self) -> Iterator[tuple[float, str]]:
        """Seconds of a step that the busiest link between two stages is taken, one way."""
        shape, seconds = self.timeline.schedule.shape, self._costs.links.seconds[0]
        first = shape.neighbours.edge_lane
        for edge, (a, b) in enumerate(shape.edges):
            lanes = seconds[first[edge] : first[edge + 1]]
            share = max(1, len(lanes)) if shape.turns else 1
            busiest = float(lanes.max(initial=0.0)) * self.plan.microbatches / share
            yield busiest, f"the transfers from stage {a} to {b}, one way"
