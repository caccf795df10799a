"""The exact minimum of the largest cell: the steady pace of a pipeline is that of its slowest stage."""

from __future__ import annotations

import numpy as np

from penstock.core.cluster import Cluster
from penstock.core.profile import Profile
from penstock.planners.cells import cut_into_cells
from penstock.planners.chain import straight_plan
from penstock.planners.outcome import Outcome, require_stages, slowest


def balance(
    profile: Profile,
    cluster: Cluster,
    *,
    stages: int | None = None,
    microbatches: int = 1,
    schedule: str = "1f1b",
) -> Outcome:
    """Minimise the largest sum of seconds over runs of layers, one run a device."""
    count = require_stages(profile, cluster, stages)
    costs = [layer.seconds / slowest(cluster) for layer in profile.layers]
    bounds, largest = cut_into_cells(costs, count, lambda cell: cell, np.maximum)
    plan = straight_plan(bounds, [[device] for device in range(count)], schedule, microbatches)
    return Outcome("balance", plan, profile, largest)
