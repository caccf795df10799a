"""Offsets between the clocks of the ranks' hosts. Ranks of one host read the same clock."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import numpy as np

from penstock.comm.world.world import World

ROUNDS = 16  # exchanges by which offsets are bounded


def offsets(world: World, read: Callable[[], int] = perf_counter_ns) -> list[int]:
    """Return the nanoseconds by which each rank's clock is ahead of rank 0's. Every rank has to call.

    A rank has everyone's message later than they sent it, so each round bounds the offset of two hosts from both sides.
    The middle of the remaining interval is taken, whose error is less than half the fastest round.
    """
    if len(set(world.hosts)) == 1:
        return [0] * world.size
    rounds = []
    for _ in range(ROUNDS):
        before = read()
        world.gather(b"")
        rounds.append((before, read()))
    parts = world.gather(np.array(rounds, np.int64).tobytes())
    times = np.array([np.frombuffer(part, np.int64).reshape(-1, 2) for part in parts])  # by rank, round, begin or end
    ahead = {host: _between(times, world.hosts, host) for host in set(world.hosts)}
    return [ahead[host] for host in world.hosts]


def _between(times: np.ndarray, hosts: tuple[str, ...], host: str) -> int:
    """Return the offset of a host's clock from that of rank 0's host."""
    if host == hosts[0]:
        return 0
    theirs, ours = ([rank for rank, at in enumerate(hosts) if at == which] for which in (host, hosts[0]))
    least = times[theirs, :, 0].max(axis=0) - times[ours, :, 1].min(axis=0)
    most = times[theirs, :, 1].min(axis=0) - times[ours, :, 0].max(axis=0)
    return int(least.max() + most.min()) // 2
