"""GPipe (Huang et al. 2019): cells whose estimated costs have the least variance.

The mean of K cells is fixed by the total, so the least variance is the least sum of squares.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from penstock.core.cluster import Cluster
from penstock.core.profile import Profile
from penstock.planners.cells import cut_into_cells
from penstock.planners.chain import straight_plan
from penstock.planners.outcome import Outcome, require_stages, slowest


def gpipe(
    profile: Profile,
    cluster: Cluster,
    *,
    stages: int | None = None,
    microbatches: int = 1,
    schedule: str = "gpipe",
) -> Outcome:
    """Minimise the variance of the cells' seconds; `seconds` of the answer is the largest cell all the same."""
    count = require_stages(profile, cluster, stages)
    costs = [layer.seconds / slowest(cluster) for layer in profile.layers]
    mean = sum(costs) / count
    bounds, _ = cut_into_cells(costs, count, lambda cell: (cell - mean) ** 2, np.add)
    largest = max(sum(costs[a:b]) for a, b in pairwise(bounds))
    plan = straight_plan(bounds, [[device] for device in range(count)], schedule, microbatches)
    return Outcome("gpipe", plan, profile, largest)
