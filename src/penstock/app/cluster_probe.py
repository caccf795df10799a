"""Transfers and all-reduces between the ranks that are here, timed as the engine would make them.

A transfer is half of a round trip over the engine's own lanes, from the call that sends to tensors that can be used. An
all-reduce is torch's, over gloo or NCCL. Sizes take turns, so that a disturbance does not fall on one of them alone;
all is repeated until the samples agree or time is up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, perf_counter

import torch
import torch.distributed as dist

from penstock.app.cluster_fit import Fit, fit, spread
from penstock.engine.transport.choose import OpenLanes, open_lanes
from penstock.engine.transport.lane import Key, LaneName, Message
from penstock.engine.world import World

SIZES = tuple(1 << exponent for exponent in range(10, 25, 2))  # 1 KB to 16 MB
LEAST, MOST = 7, 40  # repetitions
ALIKE = 0.1  # a spread of all sizes below which more repetitions add nothing
PATIENCE = 4.0  # seconds for the repetitions of one kind
Once = Callable[[torch.Tensor, int], None]  # so many operations with a tensor, by all who take part


@dataclass
class Probe:
    """What one rank needs to measure together with the others. Rank 0 takes part in all and keeps the time."""

    world: World
    device: torch.device
    lanes: OpenLanes | None = None
    tensors: dict[int, torch.Tensor] = field(init=False)
    rallies: Counter[LaneName] = field(default_factory=Counter)  # the same at both ends of a lane

    def __post_init__(self) -> None:
        self.tensors = {size: torch.zeros(size // 4, device=self.device) for size in SIZES}

    def open(self, peers: list[int]) -> None:
        """Lanes both ways between rank 0 and each peer; by all ranks."""
        ways = [LaneName(*pair) for at in range(1, len(peers) + 1) for pair in ((0, at), (at, 0))]
        self.lanes = open_lanes(self.world, ways, [0, *peers], self.device)

    def transfer(self, at: int, peer: int) -> Fit:
        """Between rank 0 and the `at`-th peer; by all ranks."""
        mine = self.world.rank in (0, peer)
        there, back = LaneName(0, at), LaneName(at, 0)
        return fit(self._repeat(mine, lambda tensor, count: self._rally(there, back, tensor, count), trips=2))

    def _rally(self, there: LaneName, back: LaneName, tensor: torch.Tensor, count: int) -> None:
        assert self.lanes is not None
        first, message, run = self.world.rank == 0, Message({0: tensor}), self.rallies[there]
        send = self.lanes.senders[there if first else back].send
        receive = self.lanes.receivers[back if first else there].receive
        for number in range(count):
            if first:
                send(Key(run, number), message)
            receive(Key(run, number))
            self._settle()
            if not first:
                send(Key(run, number), message)
        self.rallies[there] += 1

    def all_reduce(self, members: list[int]) -> Fit:
        """Over some ranks; by all ranks. As `ring_seconds` counts: a step's latency, and bytes/s of a member's link."""
        group = dist.new_group(members, backend="nccl" if self.device.type == "cuda" else "gloo")

        def reduce(tensor: torch.Tensor, count: int) -> None:
            for _ in range(count):
                dist.all_reduce(tensor, group=group)
                self._settle()

        found, n = fit(self._repeat(self.world.rank in members, reduce)), len(members)
        rate = 2 * (n - 1) / n * found.bandwidth
        return Fit(found.latency / (2 * (n - 1)), rate, found.spread, found.misfit, found.medians)

    def _repeat(self, mine: bool, once: Once, trips: int = 1) -> dict[int, list[float]]:
        """Seconds of one operation by size, the first round not counted; meaningful on rank 0."""
        found: dict[int, list[float]] = {size: [] for size in SIZES}
        began = monotonic()
        for number in range(MOST + 1):
            for size, tensor in self.tensors.items() if mine else ():
                count = max(2, min(50, (4 << 20) // size))
                at = perf_counter()
                once(tensor, count)
                if number:
                    found[size].append((perf_counter() - at) / (count * trips))
            late = number > 2 and monotonic() - began > PATIENCE
            if self._agreed(late or (number >= LEAST and _alike(found))):
                break
        return found if mine else {size: [1.0] for size in SIZES}

    def _agreed(self, enough: bool) -> bool:
        """What rank 0 thinks."""
        said = bytes([enough]) if self.world.rank == 0 else None
        return bool(self.world.broadcast(said, 0)[0])

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _alike(found: dict[int, list[float]]) -> bool:
    return max(spread(samples) for samples in found.values()) <= ALIKE
