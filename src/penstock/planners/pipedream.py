"""PipeDream (Narayanan et al. 2019): the slowest stage made as fast as possible, with replicas, level by level.

Steps, in the paper's order: sum the layers between any two states of the graph (ideals.py); at each level of the
cluster, innermost first, find the best pipeline between them over that level's components (replicate.py), each of
which is the best pipeline of the level below; unfold the choices of the outermost level into stages and devices.
Mini-batches in flight on a stage, and with them its memory, follow from the workers that come after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod

import numpy as np

from penstock.core.cluster import Cluster, Level
from penstock.core.profile import Profile
from penstock.core.schedule import LongArray
from penstock.core.validation import truth
from penstock.errors import InputError
from penstock.planners.chain import straight_plan
from penstock.planners.ideals import Ideals
from penstock.planners.infeasible import Rule, least_need, shortage
from penstock.planners.levels import UNBOUNDED, LevelTables, Table, require_constant
from penstock.planners.outcome import PlanOutcome, least_memory, slowest

GRAPHS = ("branching", "chain")


@dataclass(frozen=True)
class UnfoldedStage:
    """A stage: the states it lies between, and its devices counted from the first of its component."""

    before: int
    after: int
    devices: tuple[int, ...]


def pipedream(
    profile: Profile, cluster: Cluster, *, constant: str = "paper", graph: str = "branching", memory: bool = True
) -> PlanOutcome:
    """Minimise the seconds between two mini-batches of the steady state.

    `constant` chooses the reduction's term: "paper", "text" or "code". `graph="chain"` cuts along the profile's order
    only; `memory=False` ignores the devices' memory.
    """
    require_constant(constant)
    if graph not in GRAPHS:
        raise InputError(f"graph to be {' or '.join(GRAPHS)}", repr(graph), "choose one of them")
    ideals = Ideals.of(profile, chain=graph == "chain")
    limit = least_memory(cluster) if truth("memory", memory) else inf
    top = _levels(ideals, cluster, limit, constant)
    end = len(ideals) - 1
    table = top.table(0, 1)
    best = float(table[0][end, -1])
    if best == inf:
        rule = Rule(versions=0, replicas=1)  # replicas take whole mini-batches in turns
        raise shortage(profile, cluster, partial(least_need, rule), partial(least_need, replace(rule, recompute=True)))
    stages = _unfold(top, table, end, 1)
    ordered, bounds = ideals.arrange([0, *(stage.after for stage in stages)])
    plan = straight_plan(bounds, [stage.devices for stage in stages], "pipedream", 1)
    return PlanOutcome("pipedream", plan, ordered, best)


def _levels(ideals: Ideals, cluster: Cluster, limit: float, constant: str) -> LevelTables:
    """Make the tables of the levels that join more than one component, innermost first; returns the outermost."""
    seconds = (ideals.seconds[None, :] - ideals.seconds[:, None]) / slowest(cluster)
    fits = None if limit == inf else _most_in_flight(ideals, limit)
    levels = [level for level in cluster.levels if level.size > 1] or [Level("alone", 1, 1.0)]
    tables: LevelTables | None = None
    for level in levels:
        tables = LevelTables(ideals, level, tables, seconds, fits, constant)
    assert tables is not None
    return tables


def _most_in_flight(ideals: Ideals, limit: float) -> LongArray:
    """Return how many mini-batches a device may keep in flight for the layers between two states."""
    room = limit - (ideals.standing[None, :] - ideals.standing[:, None])
    each = ideals.version[None, :] - ideals.version[:, None]
    slack = 1e-9 * limit  # sums of bytes are not exact
    most = np.where(each > 0, (room + slack) // np.where(each > 0, each, 1.0), np.where(room >= 0, UNBOUNDED, 0))
    return np.clip(most, 0, UNBOUNDED).astype(np.int64)


def _unfold(tables: LevelTables, table: Table, end: int, ahead: int) -> list[UnfoldedStage]:
    """The stages of the best pipeline over all components of a tables, in model order."""
    _, split, taken = table
    depth, stages = tables.depth(ahead), []
    size = _devices_of(tables.under)
    last, m = end, tables.link.size
    while m:
        before, count = (int(choice[last, m]) for choice in (split, taken))
        inner = [UnfoldedStage(before, last, (0,))]
        if tables.under is not None:
            below = int(depth[m, count])
            inner = _unfold(tables.under, tables.under.table(before, below), last, below)
        firsts = [size * component for component in range(m - count, m)]
        for stage in reversed(inner):
            devices = tuple(first + device for first in firsts for device in stage.devices)
            stages.append(UnfoldedStage(stage.before, stage.after, devices))
        last, m = before, m - count
    return stages[::-1]


def _devices_of(tables: LevelTables | None) -> int:
    sizes = []
    while tables is not None:
        sizes.append(tables.link.size)
        tables = tables.under
    return prod(sizes)
