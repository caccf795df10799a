"""Seconds of a transfer between two groups of replicas, and of an all-reduce inside one group, on given devices.

The rules are those of links.py: replicas exchange the rows they have in common; each pair of devices has its own link,
or uses the uplinks of its groups at a level that is `shared`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from penstock.core.cluster import Cluster
from penstock.core.links import ring_seconds
from penstock.core.shape import common_rows


def group_transfer(cluster: Cluster, senders: Sequence[int], receivers: Sequence[int]) -> tuple[float, float]:
    """Return (seconds per byte of a whole micro-batch, latency) until the last receiver has its rows."""
    return _group_transfer(cluster, tuple(senders), tuple(receivers))


@lru_cache(maxsize=8192)
def _group_transfer(cluster: Cluster, senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[float, float]:
    busy: dict[tuple[object, ...], float] = {}
    latency = 0.0
    for i, j, rows in common_rows(len(senders), len(receivers)):
        a, b = senders[i], receivers[j]
        at = cluster.meeting_level(a, b)
        level = cluster.levels[at]
        links: tuple[tuple[object, ...], ...] = (("pair", a, b),)
        if level.shared:
            links = (("out", at, cluster.group(a, at)), ("in", at, cluster.group(b, at)))
        for link in links:
            busy[link] = busy.get(link, 0.0) + rows / level.bandwidth
        latency = max(latency, level.latency)
    return max(busy.values()), latency


def group_all_reduce(cluster: Cluster, members: Sequence[int]) -> tuple[float, float]:
    """Return (seconds per byte, latency) of an all-reduce over a ring of these devices."""
    if len(members) < 2:
        return 0.0, 0.0
    level = cluster.levels[cluster.meeting_level(min(members), max(members))]
    rate = level.reduce_rate(len(members))
    return ring_seconds(len(members), 1.0, rate), ring_seconds(len(members), 0.0, rate, level.reduce_wait)
