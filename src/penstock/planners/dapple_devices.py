"""Devices of DAPPLE's stages: three ways to take them, and figures of those that run one stage together.

fresh first     whole unused machines, then what is left of the others: fast links inside the stage
append first    what is left of partly used machines, then unused ones: no machine is broken up without need
scatter first   one device of each machine in turn: many ways out for a stage that sends much
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from penstock.core.cluster import Cluster
from penstock.core.group_costs import group_all_reduce, group_transfer
from penstock.core.links import FloatArray

Used = tuple[int, ...]  # devices in use on each machine
Devices = tuple[int, ...]


def machines(cluster: Cluster) -> tuple[int, int]:
    """Return how many machines there are, and devices on each: a machine is what the innermost level joins."""
    size = cluster.levels[0].size if cluster.levels else 1
    return len(cluster.devices) // size, size


def placements(used: Used, size: int, count: int) -> Iterable[tuple[Used, tuple[int, ...]]]:
    """Return the different results of the three ways: devices in use afterwards, and the devices taken."""
    hosts = range(len(used))
    fresh = [h for h in hosts if not used[h]]
    partly = [h for h in hosts if used[h]]
    after = {}
    for taken in (_fill(used, size, count, fresh + partly), _fill(used, size, count, partly + fresh),
                  _scatter(used, size, count)):  # fmt: skip
        devices = tuple(h * size + used[h] + d for h in hosts for d in range(taken[h]))
        after[devices] = tuple(u + t for u, t in zip(used, taken, strict=True))
    return [(used_then, devices) for devices, used_then in after.items()]


def rest(used: Used, size: int) -> tuple[int, ...]:
    """Return the devices that are not in use."""
    return tuple(h * size + d for h, taken in enumerate(used) for d in range(taken, size))


def _fill(used: Used, size: int, count: int, order: list[int]) -> list[int]:
    taken = [0] * len(used)
    for host in order:
        taken[host] = min(size - used[host], count)
        count -= taken[host]
    return taken


def _scatter(used: Used, size: int, count: int) -> list[int]:
    taken = [0] * len(used)
    while count:
        for host in range(len(used)):
            if count and used[host] + taken[host] < size:
                taken[host] += 1
                count -= 1
    return taken


@dataclass(frozen=True, eq=False)
class Teams:
    """Devices that run a stage together, as figures of each of several teams: arrays that broadcast over prefixes."""

    size: FloatArray
    pace: FloatArray  # replicas split each micro-batch
    room: FloatArray  # bytes on the fullest device
    each: FloatArray  # seconds a byte of the all-reduce
    wait: FloatArray


@dataclass(eq=False)
class DeviceFigures:
    """Figures of teams on a cluster, each worked out once."""

    cluster: Cluster
    hops: dict[object, tuple[float, float]] = field(default_factory=dict)
    figures: dict[Devices, tuple[float, ...]] = field(default_factory=dict)
    runs: dict[Devices, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.size = machines(self.cluster)[1]

    def hop(self, senders: Devices, receivers: Devices) -> tuple[float, float]:
        """Return seconds a byte and latency of a transfer; they depend on who shares a machine with whom alone, unless
        machines differ in what joins them."""
        key: object = (senders, receivers)
        if len(self.cluster.levels) <= 2:
            names: dict[int, int] = {}
            runs = (self.hosts(senders), self.hosts(receivers))
            key = tuple(tuple((names.setdefault(host, len(names)), count) for host, count in run) for run in runs)
        if key not in self.hops:
            self.hops[key] = group_transfer(self.cluster, senders, receivers)
        return self.hops[key]

    def hosts(self, devices: Devices) -> tuple[tuple[int, int], ...]:
        """Return the machines of a team in their order, and how many of its devices each has."""
        if devices not in self.runs:
            self.runs[devices] = tuple(Counter(device // self.size for device in devices).items())
        return self.runs[devices]

    def teams(self, every: list[Devices]) -> Teams:
        """Return figures by team, each an array that broadcasts over (prefix, end)."""
        return Teams(*deep([self.team(devices) for devices in every]))

    def team(self, devices: Devices) -> tuple[float, ...]:
        if devices not in self.figures:
            kinds, count = [self.cluster.devices[d] for d in devices], len(devices)
            pace, room = count * min(kind.speed for kind in kinds), min(kind.memory for kind in kinds)
            self.figures[devices] = (count, pace, room, *group_all_reduce(self.cluster, devices))
        return self.figures[devices]


def deep(figures: list[tuple[float, ...]]) -> FloatArray:
    """Return figures as [figure, move], with axes for prefixes and ends."""
    by_figure: FloatArray = np.array(figures, dtype=np.float64).T[:, :, None, None]
    return by_figure
