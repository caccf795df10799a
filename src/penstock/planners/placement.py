"""DAPPLE's three ways to take devices for a stage, given how many of each machine's are in use already.

fresh first     whole unused machines, then what is left of the others: fast links inside the stage
append first    what is left of partly used machines, then unused ones: no machine is broken up without need
scatter first   one device of each machine in turn: many ways out for a stage that sends much
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.cluster import Cluster

Used = tuple[int, ...]  # devices in use on each machine


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
