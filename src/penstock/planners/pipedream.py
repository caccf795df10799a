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
from penstock.planners.levels import UNBOUNDED, Rung, Table, require_constant
from penstock.planners.outcome import Outcome, least_memory, slowest
from penstock.planners.short import Rule, least_need, shortage

GRAPHS = ("branching", "chain")


@dataclass(frozen=True)
class Found:
    """A stage: the states it lies between, and its devices counted from the first of its component."""

    before: int
    after: int
    devices: tuple[int, ...]


def pipedream(
    profile: Profile, cluster: Cluster, *, constant: str = "paper", graph: str = "branching", memory: bool = True
) -> Outcome:
    """Minimise the seconds between two mini-batches of the steady state.

    `constant` chooses the reduction's term: "paper", "text" or "code". `graph="chain"` cuts along the profile's order
    only; `memory=False` ignores the devices' memory.
    """
    require_constant(constant)
    if graph not in GRAPHS:
        raise InputError(f"graph to be {' or '.join(GRAPHS)}", repr(graph), "choose one of them")
    ideals = Ideals.of(profile, chain=graph == "chain")
    limit = least_memory(cluster) if truth("memory", memory) else inf
    top = _rungs(ideals, cluster, limit, constant)
    end = len(ideals) - 1
    table = top.table(0, 1)
    best = float(table[0][end, -1])
    if best == inf:
        rule = Rule(versions=0, replicas=1)  # replicas take whole mini-batches in turns
        raise shortage(profile, cluster, partial(least_need, rule), partial(least_need, replace(rule, recompute=True)))
    stages = _unfold(top, table, end, 1)
    ordered, bounds = ideals.arrange([0, *(stage.after for stage in stages)])
    plan = straight_plan(bounds, [stage.devices for stage in stages], "pipedream", 1)
    return Outcome("pipedream", plan, ordered, best)


def _rungs(ideals: Ideals, cluster: Cluster, limit: float, constant: str) -> Rung:
    """The levels that join more than one component, innermost first; returns the outermost."""
    seconds = (ideals.seconds[None, :] - ideals.seconds[:, None]) / slowest(cluster)
    fits = None if limit == inf else _most_in_flight(ideals, limit)
    levels = [level for level in cluster.levels if level.size > 1] or [Level("alone", 1, 1.0)]
    rung: Rung | None = None
    for level in levels:
        rung = Rung(ideals, level, rung, seconds, fits, constant)
    assert rung is not None
    return rung


def _most_in_flight(ideals: Ideals, limit: float) -> LongArray:
    """How many mini-batches a device may keep in flight for the layers between two states."""
    room = limit - (ideals.standing[None, :] - ideals.standing[:, None])
    each = ideals.version[None, :] - ideals.version[:, None]
    slack = 1e-9 * limit  # sums of bytes are not exact
    most = np.where(each > 0, (room + slack) // np.where(each > 0, each, 1.0), np.where(room >= 0, UNBOUNDED, 0))
    return np.clip(most, 0, UNBOUNDED).astype(np.int64)


def _unfold(rung: Rung, table: Table, end: int, ahead: int) -> list[Found]:
    """The stages of the best pipeline over all components of a rung, in model order."""
    _, split, taken = table
    depth, found = rung.depth(ahead), []
    size = _devices_of(rung.under)
    last, m = end, rung.link.size
    while m:
        before, count = (int(choice[last, m]) for choice in (split, taken))
        inner = [Found(before, last, (0,))]
        if rung.under is not None:
            below = int(depth[m, count])
            inner = _unfold(rung.under, rung.under.table(before, below), last, below)
        firsts = [size * component for component in range(m - count, m)]
        for stage in reversed(inner):
            devices = tuple(first + device for first in firsts for device in stage.devices)
            found.append(Found(stage.before, stage.after, devices))
        last, m = before, m - count
    return found[::-1]


def _devices_of(rung: Rung | None) -> int:
    sizes = []
    while rung is not None:
        sizes.append(rung.link.size)
        rung = rung.under
    return prod(sizes)
