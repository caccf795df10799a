"""Seconds of a hand-over between two groups of replicas, and of an all-reduce inside one, on given devices.

The same rules as the simulator's links: replicas exchange the rows they have in common; a pair of devices has a link of
its own, or shares its group's way out and in where the level says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from penstock.core.cluster import Cluster
from penstock.core.links import ring_seconds
from penstock.core.shape import common_rows


def hand_over(cluster: Cluster, senders: Sequence[int], receivers: Sequence[int]) -> tuple[float, float]:
    """(seconds a byte of a whole micro-batch, latency): until the last receiver has its rows."""
    return _hand_over(cluster, tuple(senders), tuple(receivers))


@lru_cache(maxsize=8192)
def _hand_over(cluster: Cluster, senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[float, float]:
    busy: dict[tuple[object, ...], float] = {}
    latency = 0.0
    for i, j, rows in common_rows(len(senders), len(receivers)):
        a, b = senders[i], receivers[j]
        at = cluster.meeting_level(a, b)
        level = cluster.levels[at]
        ways: tuple[tuple[object, ...], ...] = (("pair", a, b),)
        if level.shared:
            ways = (("out", at, cluster.group(a, at)), ("in", at, cluster.group(b, at)))
        for way in ways:
            busy[way] = busy.get(way, 0.0) + rows / level.bandwidth
        latency = max(latency, level.latency)
    return max(busy.values()), latency


def all_reduce(cluster: Cluster, members: Sequence[int]) -> tuple[float, float]:
    """(seconds a byte, latency) of an all-reduce over a ring of these devices."""
    if len(members) < 2:
        return 0.0, 0.0
    level = cluster.levels[cluster.meeting_level(min(members), max(members))]
    rate = level.reduce_rate(len(members))
    return ring_seconds(len(members), 1.0, rate), ring_seconds(len(members), 0.0, rate, level.reduce_wait)
