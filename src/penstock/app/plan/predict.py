"""The predicted cost of a plan, by simulating its schedule on its cluster."""

from __future__ import annotations

from math import lcm
from typing import Any

from penstock.core.cluster import Cluster
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.timeline import Timeline
from penstock.planners.outcome import PlanOutcome
from penstock.planners.prediction import Prediction
from penstock.schedules.registry import METHODS, schedule
from penstock.simulator.simulate import simulate
from penstock.simulator.uneven import uneven_makespan


def predict(outcome: PlanOutcome, cluster: Cluster) -> Prediction:
    """Simulate one step of a synchronous plan; of an asynchronous one, enough mini-batches to determine their pace."""
    plan, profile = outcome.plan, outcome.profile
    if not METHODS[plan.schedule].asynchronous:
        line = _run(plan, profile, cluster, 1)
        return Prediction(outcome, cluster, line, uneven_makespan(line, profile.jitter))
    some = some_batches(plan)
    short, long = _run(plan, profile, cluster, some), _run(plan, profile, cluster, 2 * some)
    first, both = (uneven_makespan(line, profile.jitter) for line in (short, long))
    return Prediction(outcome, cluster, long, (both - first) / some)


def some_batches(plan: Plan) -> int:
    """Return a number of mini-batches that more than fill the pipeline; for replicas that take turns, a multiple of
    their cycle."""
    if METHODS[plan.schedule].name == "2bw" or max(plan.replicas) == 1:  # each micro-batch is split over the replicas
        return 4 + -(-4 * plan.ranks // plan.microbatches)
    cycle, slots = lcm(*plan.replicas), len(plan.slots)
    return cycle * -(-4 * slots // cycle) if cycle <= 1000 else 4 * slots


def _run(plan: Plan, profile: Profile, cluster: Cluster, batches: int) -> Timeline:
    chain = {(s, s + 1) for s in range(len(plan.stages) - 1)}
    options: dict[str, Any] = dict(plan.options)
    built = schedule(
        plan.schedule,
        stages=plan.ranks,
        microbatches=plan.microbatches,
        batches=batches,
        replicas=plan.replicas,
        edges=sorted(chain | set(profile.crossing(plan.cuts))),
        chunks=plan.chunks if plan.chunks > 1 else None,
        **options,
    )
    return simulate(built, profile=profile, plan=plan, cluster=cluster)
