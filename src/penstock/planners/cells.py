"""Cut a list of costs into cells that minimise some measure of them, exactly, by dynamic programming.

best(k, j), the least measure of the first j costs in k cells, is the least over i of join(best(k-1, i), cell(i, j)).
All i and j of one k are one array operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.links import FloatArray
from penstock.errors import InputError


def cut_into_cells(
    costs: Sequence[float],
    count: int,
    measure: Callable[[FloatArray], FloatArray],
    join: Callable[[FloatArray, FloatArray], FloatArray],
) -> tuple[list[int], float]:
    """Where the cells begin and the last one ends, and the measure; each cell holds at least one cost."""
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
