"""Score many plans by simulation; each schedule is built and verified once for all cuts that use it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.app.plan.predict import some_batches
from penstock.core.check import Proven, prove
from penstock.core.cluster import Cluster
from penstock.core.collapse_replicas import collapse_replicas, collapsed_costs
from penstock.core.cost import plan_costs
from penstock.core.peaks import peaks
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.timeline import Timeline
from penstock.planners.outcome import PlanScore
from penstock.schedules.registry import METHODS, schedule
from penstock.simulator.simulate import clock

MOST_ROWS = 8_000_000  # of all cached schedules, at about 40 bytes


class ScheduleKey(NamedTuple):
    """Everything that determines a schedule."""

    name: str
    stages: int
    microbatches: int
    batches: int
    replicas: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    chunks: int
    options: tuple[tuple[str, Any], ...]

    def prove(self) -> Proven:
        arguments = self._asdict() | dict(self.options)
        del arguments["options"]
        if self.chunks == 1:
            del arguments["chunks"]
        return prove(schedule(**arguments))


class ProofCache:
    """The most recently used verified schedules, up to `most` rows in all."""

    def __init__(self, most: int = MOST_ROWS) -> None:
        self.most, self.rows = most, 0
        self._proven: dict[ScheduleKey, Proven] = {}  # in the order of last use

    def __len__(self) -> int:
        return len(self._proven)

    def get(self, key: ScheduleKey) -> Proven:
        proven = self._proven.pop(key, None)
        if proven is None:
            proven = key.prove()
            self.rows += len(proven.schedule)
        self._proven[key] = proven
        while self.rows > self.most:
            oldest = next(iter(self._proven))
            self.rows -= len(self._proven.pop(oldest).schedule)
        return proven


class Scorer:
    """A scorer of plans for one cluster. Identical replicas of a rank are simulated as one slot."""

    def __init__(self, cluster: Cluster, folding: bool = True) -> None:
        self.cluster, self.folding, self.proofs = cluster, folding, ProofCache()

    def __call__(self, plan: Plan, profile: Profile) -> PlanScore:
        turns = METHODS[plan.schedule].asynchronous and plan.schedule != "2bw"
        whole = max(plan.replicas) > 1 and (turns or not self.folding)
        lines = [self._run(plan, profile, batches, whole) for batches in self._batches(plan)]
        seconds = lines[0].makespan
        if len(lines) > 1:
            seconds = (lines[1].makespan - seconds) / (len_of(lines[1]) - len_of(lines[0]))
        longest, costs = lines[-1].schedule, lines[-1].costs
        assert costs is not None  # costs were given to the clock
        held = peaks(longest, costs)
        ranks = [min(self.cluster.devices[d].memory for slot in rank for d in slot) for rank in plan.devices]
        rooms = np.array(ranks)[longest.shape.slot_rank]
        return PlanScore(float(seconds), float((held - rooms - 1e-6 * held).max()))

    def _batches(self, plan: Plan) -> tuple[int, ...]:
        if not METHODS[plan.schedule].asynchronous:
            return (1,)
        some = some_batches(plan)
        return some, 2 * some

    def _run(self, plan: Plan, profile: Profile, batches: int, whole: bool) -> Timeline:
        chain = {(s, s + 1) for s in range(len(plan.stages) - 1)}
        edges = tuple(sorted(chain | set(profile.crossing(plan.cuts))))
        replicas = plan.replicas if whole else collapse_replicas(plan).replicas
        key = ScheduleKey(
            plan.schedule, plan.ranks, plan.microbatches, batches, replicas, edges, plan.chunks, plan.options
        )
        proven = self.proofs.get(key)
        shape = proven.schedule.shape
        if whole:
            return clock(proven, plan_costs(shape, profile, plan, self.cluster))
        return clock(proven, collapsed_costs(shape, profile, plan, self.cluster))


def len_of(line: Timeline) -> int:
    return line.schedule.shape.batches
