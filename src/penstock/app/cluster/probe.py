"""Time transfers and all-reduces between the ranks, and fit seconds = latency + bytes / bandwidth to them.

A transfer is half of a round trip over the engine's own lanes, from the call that sends to tensors that can be used.
The fit takes least squares of the relative errors of the medians: with absolute ones the largest size would decide
alone, and the latency would be the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.comm.transport.interface import Key, LaneName, Message
from penstock.comm.transport.open import OpenLanes, open_lanes
from penstock.comm.world.world import World

NOISY = 0.25  # of the median: a middle half of the samples that is wider tells of other work on the machine
BENT = 0.5  # of the median: a line that misses one by more says little about that size

Samples = Mapping[int, Sequence[float]]  # seconds, by bytes


@dataclass(frozen=True)
class Fit:
    """A line and how far it can be trusted."""

    latency: float
    bandwidth: float
    spread: float  # the widest middle half of a size's samples, as a share of their median
    misfit: float  # the median furthest from the line, as a share of that median
    medians: dict[int, float]

    @property
    def doubts(self) -> list[str]:
        found = []
        if self.spread > NOISY:
            found.append(f"noisy: samples of one size differ by {self.spread:.0%}; measure again on a quiet machine")
        if self.misfit > BENT:
            found.append(f"no straight line: one size is {self.misfit:.0%} off")
        return found

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "doubts": self.doubts}


def spread(samples: Sequence[float]) -> float:
    """The middle half of some samples, as a share of their median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def fit(samples: Samples) -> Fit:
    """The line through the medians; neither latency nor seconds a byte come out below 0."""
    medians = {size: median(seconds) for size, seconds in samples.items()}
    size, seconds = np.array(list(medians)), np.array(list(medians.values()))
    latency, each = _line(size / seconds, 1.0 / seconds)
    missed = np.abs(latency + each * size - seconds) / seconds
    widest = max(spread(some) for some in samples.values())
    return Fit(latency, 1.0 / each, widest, float(missed.max()), medians)


def _line(size: np.ndarray[Any, Any], one: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Latency and seconds a byte such that latency·one + each·size comes closest to 1."""
    (latency, each), *_ = np.linalg.lstsq(np.stack([one, size], axis=1), np.ones(len(size)), rcond=None)
    if latency < 0:
        latency, each = 0.0, size.sum() / (size**2).sum()
    if each <= 0:  # time that does not grow with size: as little as could be told from the largest
        each = 1e-3 / size.max()
    return float(latency), float(each)


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
