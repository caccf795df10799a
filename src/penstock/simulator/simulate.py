"""Schedule × costs → Timeline."""

from __future__ import annotations

from typing import Unpack

from penstock.core.arguments import named, parameters_of, refuse_unknown
from penstock.core.check import Proven, prove
from penstock.core.cluster import Cluster
from penstock.core.cost import Costs, FlatCosts, flat_costs, plan_costs
from penstock.core.links import FloatArray
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.schedule import Schedule, require_schedule
from penstock.core.timeline import Timeline
from penstock.errors import InputError
from penstock.simulator.run import run


@named
def simulate(
    schedule: Schedule,
    *,
    profile: Profile | None = None,
    plan: Plan | None = None,
    cluster: Cluster | None = None,
    **numbers: Unpack[FlatCosts],
) -> Timeline:
    """Predict when everything happens, from a few numbers or from a profile, a plan and a cluster.

    `numbers` are those of `flat_costs`: `forward=1.0, input_grad=1.0, weight_grad=1.0, transfer=0.0, ...`, each one
    number or one a stage.
    """
    refuse_unknown("simulate", numbers, [*FlatCosts.__annotations__, *parameters_of(simulate)])
    require_schedule(schedule)
    given = (profile, plan, cluster)
    if profile is None and plan is None and cluster is None:
        return simulate_costs(schedule, flat_costs(schedule.shape, **numbers))
    if profile is None or plan is None or cluster is None or numbers:
        missing = [name for name, value in zip(("profile", "plan", "cluster"), given, strict=True) if value is None]
        raise InputError(
            "profile, plan and cluster together, or numbers alone",
            f"no {', '.join(missing)}" if missing else f"also {', '.join(numbers)}",
            "give the three together and no numbers beside them",
        )
    return simulate_costs(schedule, plan_costs(schedule.shape, profile, plan, cluster))


def simulate_costs(schedule: Schedule, costs: Costs) -> Timeline:
    """Predict the same from costs. The schedule is proven sound first."""
    line = clock(prove(schedule, progress=False), costs)
    if len(line.end) and line.end.min() < 0:  # a deadlock: the law of progress says who waits for whom
        prove(schedule)
    return line


def clock(proven: Proven, costs: Costs, factors: FloatArray | None = None) -> Timeline:
    """Time a schedule that has been proven: several costs can share one proof. `factors`: see `run`."""
    start, end = run(proven, costs, factors)
    return Timeline(proven.schedule, start, end, costs=costs)
