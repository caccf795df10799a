"""Links between slots, and the seconds of a transfer and of an all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.core.cluster import Cluster
from penstock.core.shape import IntArray, Shape

FloatArray = npt.NDArray[np.float64]


def ring_seconds(members: int, size: float, bandwidth: float, latency: float = 0.0) -> float:
    """Return the seconds of a ring all-reduce: each member sends 2(n-1)/n of `size` bytes in 2(n-1) steps."""
    return 0.0 if members < 2 else 2 * (members - 1) / members * size / bandwidth + 2 * (members - 1) * latency


@dataclass(frozen=True, eq=False)
class Links:
    """The link of each lane, forward ([0]) and backward ([1]); a lane is one (edge, sending, receiving replica).

    `leave` and `enter` are the resources that a transfer occupies for `seconds`; -1 is none. `latency` is added and
    occupies no resource. `shared` means that different slots send over one resource, so that arrival order matters.
    `held` is how long the sending slot is blocked.
    """

    seconds: FloatArray  # (2, lanes)
    latency: FloatArray
    leave: IntArray
    enter: IntArray
    shared: bool
    held: FloatArray

    @property
    def resources(self) -> int:
        return int(max(self.leave.max(initial=-1), self.enter.max(initial=-1))) + 1

    def free(self) -> Links:
        """Return the same links with transfers that take no time."""
        zeros = np.zeros_like(self.seconds)
        return replace(self, seconds=zeros, latency=zeros, held=zeros)


def _no_links(shape: Shape) -> tuple[FloatArray, FloatArray, IntArray, IntArray]:
    lanes = int(shape.neighbours.edge_lane[-1])
    zeros = np.zeros((2, lanes))
    none = np.full((2, lanes), -1, dtype=np.int32)
    return zeros, zeros.copy(), none, none.copy()


def pair_links(shape: Shape, seconds: FloatArray) -> Links:
    """Return links for slots that each have a full-duplex link to every other, for one tensor at a time each way.

    `seconds[edge]` is the time of a whole micro-batch over that edge, either way.
    """
    time, latency, leave, enter = _no_links(shape)
    lanes = shape.lanes
    time[:, lanes.number] = seconds[lanes.edge] * lanes.share
    leave[:, lanes.number] = lanes.pairs
    return Links(time, latency, leave, enter, shared=False, held=np.zeros_like(time))


def cluster_links(shape: Shape, sizes: FloatArray, devices: Sequence[int], cluster: Cluster) -> Links:
    """Return the links of a cluster, for `sizes[edge]` bytes per micro-batch and slots on `devices[slot]`."""
    time, latency, leave, enter = _no_links(shape)
    held = np.zeros_like(time)
    names: dict[tuple[object, ...], int] = {}
    senders: dict[int, set[int]] = {}
    lanes = shape.lanes
    columns = (column.tolist() for column in (lanes.number, lanes.source, lanes.target, lanes.edge, lanes.share))
    for lane, a, b, edge, fraction in zip(*columns, strict=True):
        at = cluster.meeting_level(devices[a], devices[b])
        level = cluster.levels[at]
        time[:, lane] = sizes[edge] * fraction / level.bandwidth
        latency[:, lane] = level.latency
        held[:, lane] = time[:, lane] if level.blocking else 0.0
        for way, (source, target) in enumerate(((a, b), (b, a))):
            if level.shared:
                leaving = ("out", at, cluster.group(devices[source], at))
                enter[way, lane] = names.setdefault(("in", at, cluster.group(devices[target], at)), len(names))
            else:
                leaving = ("pair", devices[source], devices[target])
            leave[way, lane] = names.setdefault(leaving, len(names))
            for resource in (leave[way, lane], enter[way, lane]):
                senders.setdefault(int(resource), set()).add(source)
    shared = any(len(slots) > 1 for resource, slots in senders.items() if resource >= 0)
    return Links(time, latency, leave, enter, shared, held)
