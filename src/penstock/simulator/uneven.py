"""Mean makespan of a run in which an action does not take the same each time.

Ranks that wait for each other at every hand-over lose the slower one's time each time, so a run of uneven actions takes
longer than one in which each takes its mean. How much longer depends on the schedule: it is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from statistics import mean

import numpy as np

from penstock.core.check import prove
from penstock.core.links import FloatArray
from penstock.core.timeline import Timeline
from penstock.simulator.simulate import clock

PAIRS = 4  # of draws: in each pair one has the other's deviations with the opposite sign


def uneven_makespan(line: Timeline, jitter: float, seed: int = 0) -> float:
    """Return the mean makespan of simulations like `line` whose actions' seconds deviate by `jitter` of their mean.

    The deviation is the root of the mean square. A seed gives the same mean each time; without jitter it is that of
    `line` itself.

    Over a pair every action takes its mean. A makespan is the longest of sums, so the pair's is no less than that of
    the means, unless links are shared, on which another order of transfers may be the better one.
    """
    if not jitter:
        return line.makespan
    assert line.costs is not None  # a simulation has them
    proven, costs = prove(line.schedule, progress=False), line.costs
    return mean(clock(proven, costs, factors).makespan for factors in _factors(len(line.schedule), jitter, seed))


def _factors(rows: int, jitter: float, seed: int) -> Iterator[FloatArray]:
    """Yield factors for the seconds of every row, spread evenly about 1, none below 0."""
    dice, widest = np.random.default_rng(seed), min(sqrt(3.0) * jitter, 1.0)
    for _ in range(PAIRS):
        deviation = dice.uniform(-widest, widest, rows)
        yield 1.0 + deviation
        yield 1.0 - deviation
