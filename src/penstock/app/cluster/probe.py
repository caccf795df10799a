"""Time transfers and all-reduces between the ranks, and fit seconds = latency + bytes / bandwidth.

A transfer is half of a round trip over the engine's own lanes, from the call that sends to usable tensors. The fit
minimizes the squared relative errors of the medians: with absolute errors the largest size alone would decide, and the
latency would be what is left over.
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

from penstock.comm.transport.interface import LaneName, Message, MessageKey
from penstock.comm.transport.open import OpenLanes, open_lanes
from penstock.comm.world.world import World

NOISY = 0.25  # of the median: a wider interquartile range means that other work disturbed the machine
MISFIT = 0.5  # of the median: beyond that error, the line does not describe a size

Samples = Mapping[int, Sequence[float]]  # seconds, by bytes


@dataclass(frozen=True)
class Fit:
    """A fitted line, and how reliable it is."""

    latency: float
    bandwidth: float
    spread: float  # the widest interquartile range of a size's samples, as a share of their median
    misfit: float  # the largest error of the line, as a share of that size's median
    medians: dict[int, float]

    @property
    def doubts(self) -> list[str]:
        doubts = []
        if self.spread > NOISY:
            doubts.append(f"noisy: samples of one size differ by {self.spread:.0%}; measure again on a quiet machine")
        if self.misfit > MISFIT:
            doubts.append(f"no straight line: one size is {self.misfit:.0%} off")
        return doubts

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "doubts": self.doubts}


def spread(samples: Sequence[float]) -> float:
    """Return the interquartile range of some samples as a share of their median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def fit(samples: Samples) -> Fit:
    """Return the line through the medians, with latency and seconds a byte of at least 0."""
    medians = {size: median(seconds) for size, seconds in samples.items()}
    size, seconds = np.array(list(medians)), np.array(list(medians.values()))
    latency, each = _line(size / seconds, 1.0 / seconds)
    missed = np.abs(latency + each * size - seconds) / seconds
    widest = max(spread(some) for some in samples.values())
    return Fit(latency, 1.0 / each, widest, float(missed.max()), medians)


def _line(size: np.ndarray[Any, Any], one: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return latency and seconds a byte for which latency·one + each·size is closest to 1."""
    (latency, each), *_ = np.linalg.lstsq(np.stack([one, size], axis=1), np.ones(len(size)), rcond=None)
    if latency < 0:
        latency, each = 0.0, size.sum() / (size**2).sum()
    if each <= 0:  # the time does not grow with size: use the smallest slope that the largest size could show
        each = 1e-3 / size.max()
    return float(latency), float(each)


SIZES = tuple(1 << exponent for exponent in range(10, 25, 2))  # 1 KB to 16 MB
LEAST, MOST = 7, 40  # repetitions
STABLE = 0.1  # the spread of all sizes below which more repetitions are not needed
PATIENCE = 4.0  # seconds for the repetitions of one kind
# Runs an operation with a tensor that many times, on all participating ranks.
Operation = Callable[[torch.Tensor, int], None]


@dataclass
class Probe:
    """The measurements of one rank together with the others. Rank 0 takes part in all and keeps the time."""

    world: World
    device: torch.device
    lanes: OpenLanes | None = None
    tensors: dict[int, torch.Tensor] = field(init=False)
    round_trips: Counter[LaneName] = field(default_factory=Counter)  # the same at both ends of a lane

    def __post_init__(self) -> None:
        self.tensors = {size: torch.zeros(size // 4, device=self.device) for size in SIZES}

    def open(self, peers: list[int]) -> None:
        """Open lanes in both directions between rank 0 and each peer. All ranks have to call."""
        ways = [LaneName(*pair) for at in range(1, len(peers) + 1) for pair in ((0, at), (at, 0))]
        self.lanes = open_lanes(self.world, ways, [(0,), *((peer,) for peer in peers)], self.device)

    def transfer(self, at: int, peer: int) -> Fit:
        """Measure transfers between rank 0 and the `at`-th peer. All ranks have to call."""
        participates = self.world.rank in (0, peer)
        there, back = LaneName(0, at), LaneName(at, 0)
        return fit(
            self._repeat(participates, lambda tensor, count: self._round_trips(there, back, tensor, count), trips=2)
        )

    def _round_trips(self, there: LaneName, back: LaneName, tensor: torch.Tensor, count: int) -> None:
        assert self.lanes is not None
        first, message, run = self.world.rank == 0, Message({0: tensor}), self.round_trips[there]
        send = self.lanes.senders[there if first else back].send
        receive = self.lanes.receivers[back if first else there].receive
        for number in range(count):
            if first:
                send(MessageKey(run, number), message)
            receive(MessageKey(run, number))
            self._synchronize()
            if not first:
                send(MessageKey(run, number), message)
        self.round_trips[there] += 1

    def all_reduce(self, members: list[int]) -> Fit:
        """Measure all-reduces over some ranks. All ranks have to call. Returns, as `ring_seconds` counts, the latency
        of a ring step and the bytes/s of a member's link."""
        group = dist.new_group(members, backend="nccl" if self.device.type == "cuda" else "gloo")

        def reduce(tensor: torch.Tensor, count: int) -> None:
            for _ in range(count):
                dist.all_reduce(tensor, group=group)
                self._synchronize()

        line, n = fit(self._repeat(self.world.rank in members, reduce)), len(members)
        rate = 2 * (n - 1) / n * line.bandwidth
        return Fit(line.latency / (2 * (n - 1)), rate, line.spread, line.misfit, line.medians)

    def _repeat(self, participates: bool, once: Operation, trips: int = 1) -> dict[int, list[float]]:
        """Return the seconds of one operation by size, without the first repetition; valid on rank 0."""
        samples: dict[int, list[float]] = {size: [] for size in SIZES}
        began = monotonic()
        for number in range(MOST + 1):
            for size, tensor in self.tensors.items() if participates else ():
                count = max(2, min(50, (4 << 20) // size))
                at = perf_counter()
                once(tensor, count)
                if number:
                    samples[size].append((perf_counter() - at) / (count * trips))
            late = number > 2 and monotonic() - began > PATIENCE
            if self._rank_0_decides(late or (number >= LEAST and _is_stable(samples))):
                break
        return samples if participates else {size: [1.0] for size in SIZES}

    def _rank_0_decides(self, enough: bool) -> bool:
        """Return rank 0's argument on all ranks."""
        answer = bytes([enough]) if self.world.rank == 0 else None
        return bool(self.world.broadcast(answer, 0)[0])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _is_stable(samples_by_size: dict[int, list[float]]) -> bool:
    return max(spread(samples) for samples in samples_by_size.values()) <= STABLE
