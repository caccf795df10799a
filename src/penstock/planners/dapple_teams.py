"""What devices that run one stage together can do, and what a hand-over between two such teams takes; remembered."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from penstock.core.cluster import Cluster
from penstock.core.group_costs import group_all_reduce, group_transfer
from penstock.core.links import FloatArray
from penstock.planners.dapple_rows import Devices
from penstock.planners.placement import machines


@dataclass(frozen=True, eq=False)
class Teams:
    """Devices that run a stage together, as figures of each of several teams: arrays that broadcast over prefixes."""

    size: FloatArray
    pace: FloatArray  # replicas split each micro-batch
    room: FloatArray  # bytes on the fullest device
    each: FloatArray  # seconds a byte of the all-reduce
    wait: FloatArray


@dataclass(eq=False)
class Known:
    """Figures of teams on a cluster, each worked out once."""

    cluster: Cluster
    hops: dict[object, tuple[float, float]] = field(default_factory=dict)
    figures: dict[Devices, tuple[float, ...]] = field(default_factory=dict)
    runs: dict[Devices, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.size = machines(self.cluster)[1]

    def hop(self, senders: Devices, receivers: Devices) -> tuple[float, float]:
        """Only how many share a machine with whom matters, unless machines differ in what joins them."""
        key: object = (senders, receivers)
        if len(self.cluster.levels) <= 2:
            names: dict[int, int] = {}
            runs = (self.hosts(senders), self.hosts(receivers))
            key = tuple(tuple((names.setdefault(host, len(names)), count) for host, count in run) for run in runs)
        if key not in self.hops:
            self.hops[key] = group_transfer(self.cluster, senders, receivers)
        return self.hops[key]

    def hosts(self, devices: Devices) -> tuple[tuple[int, int], ...]:
        """The machines of a team in their order, and how many of its devices each has."""
        if devices not in self.runs:
            self.runs[devices] = tuple(Counter(device // self.size for device in devices).items())
        return self.runs[devices]

    def teams(self, every: list[Devices]) -> Teams:
        """Figures by team, each an array that broadcasts over (prefix, end)."""
        return Teams(*deep([self.team(devices) for devices in every]))

    def team(self, devices: Devices) -> tuple[float, ...]:
        if devices not in self.figures:
            kinds, count = [self.cluster.devices[d] for d in devices], len(devices)
            pace, room = count * min(kind.speed for kind in kinds), min(kind.memory for kind in kinds)
            self.figures[devices] = (count, pace, room, *group_all_reduce(self.cluster, devices))
        return self.figures[devices]


def deep(figures: list[tuple[float, ...]]) -> FloatArray:
    """[figure, move], with room for prefixes and ends."""
    found: FloatArray = np.array(figures, dtype=np.float64).T[:, :, None, None]
    return found
