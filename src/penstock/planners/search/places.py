"""Runs of neighbouring devices in an order: speed, memory, all-reduce and hop of a stage replicated on them.

Tables are by (first device of the run, number of the replica count). A unit may stand for several devices, so that
thousands of them stay a table of a hundred rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.core.cluster import Cluster
from penstock.core.group_costs import group_all_reduce
from penstock.core.links import FloatArray
from penstock.core.schedule import LongArray

MOST_UNITS = 64
MOST_COUNTS = 24


class Places(NamedTuple):
    """Runs of units, each of `unit` devices, by (first unit, number of the replica count)."""

    unit: int
    units: int
    counts: LongArray  # replica counts in units, ascending, one first
    slow: FloatArray  # seconds on the slowest device of the run, as a multiple of the profiled one's
    room: FloatArray  # bytes on the device with the least memory
    rate: FloatArray  # seconds a byte of an all-reduce over the run, and its latency
    wait: FloatArray
    hop: FloatArray  # seconds a byte from the run's first device to the one behind the run, and latency
    pause: FloatArray
    host: FloatArray  # seconds a byte to host memory; infinite where there is no way

    @classmethod
    def of(cls, cluster: Cluster, order: tuple[int, ...], alone: bool = False) -> Places:
        """Return the runs of an order of devices; with `alone`, of one device each."""
        unit = 1 if alone else unit_of(cluster)
        units = len(order) // unit
        counts = np.ones(1, dtype=np.int64) if alone else replica_counts(units)
        shape = (units, len(counts))
        tables = {name: np.full(shape, np.inf) for name in ("slow", "rate", "wait", "hop", "pause", "host")}
        room = np.zeros(shape)
        figures = [(kind.speed, kind.memory, kind.host_bandwidth) for kind in cluster.devices]
        each = np.array(figures)[list(order)]  # by place in the order
        for start in range(units):
            for at, count in enumerate(counts.tolist()):
                run = order[start * unit : (start + count) * unit]
                if start + count > units:
                    break
                speed, memory, way = each[start * unit : (start + count) * unit].min(axis=0).tolist()
                tables["slow"][start, at], room[start, at] = 1.0 / speed, memory
                tables["rate"][start, at], tables["wait"][start, at] = group_all_reduce(cluster, run)
                if start + count < units:
                    level = cluster.levels[cluster.meeting_level(run[0], order[(start + count) * unit])]
                    tables["hop"][start, at], tables["pause"][start, at] = 1.0 / level.bandwidth, level.latency
                tables["host"][start, at] = 1.0 / way if way else np.inf
        return cls(unit, units, counts, room=room, **tables)


def unit_of(cluster: Cluster) -> int:
    """Return how many devices count as one: more than one where there are many, in parts of hosts or whole hosts."""
    unit = 1
    for level in cluster.levels:
        left = level.size
        while len(cluster.devices) // unit > MOST_UNITS and left > 1:
            factor = next(f for f in range(2, left + 1) if left % f == 0)
            unit, left = unit * factor, left // factor
    return unit


def replica_counts(units: int) -> LongArray:
    """Return every count where there are few; else powers of two, half as many again, and shares of all."""
    if units <= MOST_COUNTS:
        return np.arange(1, units + 1)
    powers = {1 << k for k in range(units.bit_length()) if 1 << k <= units}
    halves = {3 * power // 2 for power in powers if 3 * power // 2 <= units}
    shares = {units // k for k in range(1, 7)} | {units - 1, units * 3 // 4}
    return np.array(sorted(powers | halves | shares))
