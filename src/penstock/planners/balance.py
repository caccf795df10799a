"""Cut the layers evenly: by the largest cell, exactly, or as GPipe does by the least variance.

A cell is a run of layers, one stage. best(k, j), the least measure of the first j costs in k cells, is the least over i
of join(best(k-1, i), cell(i, j)); all i and j of one k are one array operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from penstock.core.cluster import Cluster
from penstock.core.links import FloatArray
from penstock.core.profile import Profile
from penstock.errors import InputError
from penstock.planners.chain import straight_plan
from penstock.planners.outcome import PlanOutcome, require_stages, slowest


def cut_into_cells(
    costs: Sequence[float],
    count: int,
    measure: Callable[[FloatArray], FloatArray],
    join: Callable[[FloatArray, FloatArray], FloatArray],
) -> tuple[list[int], float]:
    """Return where the cells begin and the last one ends, and the measure; each cell holds at least one cost."""
    if not 1 <= count <= len(costs):
        raise InputError(f"1 to {len(costs)} cells, one for each layer at most", count, "ask for fewer stages")
    sums = np.concatenate(([0.0], np.cumsum(costs)))
    cell = measure(sums[None, :] - sums[:, None])  # [i, j]: costs i to j - 1
    cell[np.tril_indices(len(sums))] = np.inf
    best, chosen = cell[0].copy(), []
    for _ in range(1, count):
        every = join(best[:, None], cell)
        chosen.append(np.argmin(every, axis=0))
        best = np.min(every, axis=0)
    bounds = [len(costs)]
    for before in reversed(chosen):
        bounds.append(int(before[bounds[-1]]))
    return [0, *reversed(bounds)], float(best[-1])


def even_cells(costs: Sequence[float], count: int) -> tuple[list[int], float]:
    """Return the cells whose largest is least, where they begin and the last one ends, and that largest.

    Of the many cuts that share the minimum this is the one of least variance, so that no stage is needlessly large.
    """
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
) -> PlanOutcome:
    """Minimise the largest sum of seconds over runs of layers, one run a device: it sets the steady pace."""
    count = require_stages(profile, cluster, stages)
    costs = [layer.seconds / slowest(cluster) for layer in profile.layers]
    bounds, largest = even_cells(costs, count)
    plan = straight_plan(bounds, [[device] for device in range(count)], schedule, microbatches)
    return PlanOutcome("balance", plan, profile, largest)


def gpipe(
    profile: Profile,
    cluster: Cluster,
    *,
    stages: int | None = None,
    microbatches: int = 1,
    schedule: str = "gpipe",
) -> PlanOutcome:
    """Minimise the variance of the cells' seconds (Huang et al. 2019); `seconds` of the plan is still the largest cell.

    The mean of K cells is fixed by the total, so the least variance is the least sum of squares.
    """
    count = require_stages(profile, cluster, stages)
    costs = [layer.seconds / slowest(cluster) for layer in profile.layers]
    mean = sum(costs) / count
    bounds, _ = cut_into_cells(costs, count, lambda cell: (cell - mean) ** 2, np.add)
    largest = max(sum(costs[a:b]) for a, b in pairwise(bounds))
    plan = straight_plan(bounds, [[device] for device in range(count)], schedule, microbatches)
    return PlanOutcome("gpipe", plan, profile, largest)
