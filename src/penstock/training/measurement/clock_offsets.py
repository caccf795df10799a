"""How far the clocks of the ranks' hosts are apart. Ranks of one host read the same clock."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import numpy as np

from penstock.comm.world.world import World

ROUNDS = 16  # of asking all clocks


def offsets(world: World, read: Callable[[], int] = perf_counter_ns) -> list[int]:
    """Nanoseconds by which each rank's clock is ahead of rank 0's. Every rank has to ask.

    Who has everybody's message has it later than they sent it: each round bounds the offset of two hosts from both
    sides, and the middle of what all rounds leave is taken. So it errs by less than half the fastest round.
    """
    if len(set(world.hosts)) == 1:
        return [0] * world.size
    rounds = []
    for _ in range(ROUNDS):
        before = read()
        world.gather(b"")
        rounds.append((before, read()))
    said = world.gather(np.array(rounds, np.int64).tobytes())
    asked = np.array([np.frombuffer(part, np.int64).reshape(-1, 2) for part in said])  # by rank, round, before or after
    ahead = {host: _between(asked, world.hosts, host) for host in set(world.hosts)}
    return [ahead[host] for host in world.hosts]


def _between(asked: np.ndarray, hosts: tuple[str, ...], host: str) -> int:
    """The offset of a host's clock from that of rank 0's host."""
    if host == hosts[0]:
        return 0
    theirs, ours = ([rank for rank, at in enumerate(hosts) if at == which] for which in (host, hosts[0]))
    least = asked[theirs, :, 0].max(axis=0) - asked[ours, :, 1].min(axis=0)
    most = asked[theirs, :, 1].min(axis=0) - asked[ours, :, 0].max(axis=0)
    return int(least.max() + most.min()) // 2
