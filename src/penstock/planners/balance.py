"""The exact minimum of the largest cell: the steady pace of a pipeline is that of its slowest stage.

Many cuts share that minimum; among them the one with the least variance is taken, so that no stage is needlessly large.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.cluster import Cluster
from penstock.core.links import FloatArray
from penstock.core.profile import Profile
from penstock.planners.cells import cut_into_cells
from penstock.planners.chain import straight_plan
from penstock.planners.outcome import Outcome, require_stages, slowest


def even_cells(costs: Sequence[float], count: int) -> tuple[list[int], float]:
    """Where the cells begin and the last one ends, and the largest cell."""
    _, largest = cut_into_cells(costs, count, lambda cell: cell, np.maximum)

    def square(cell: FloatArray) -> FloatArray:
        return np.where(cell <= largest * (1 + 1e-12), cell**2, np.inf)

    return cut_into_cells(costs, count, square, np.add)[0], largest


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
    bounds, largest = even_cells(costs, count)
    plan = straight_plan(bounds, [[device] for device in range(count)], schedule, microbatches)
    return Outcome("balance", plan, profile, largest)
