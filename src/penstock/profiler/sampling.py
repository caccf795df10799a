"""Take samples of a measurement until enough of them are undisturbed.

Several processes may measure at the same time, to load the machine as a pipeline's ranks do. They begin each sample
together, and a sample that was disturbed for one of them counts as disturbed for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from penstock.core.links import FloatArray
from penstock.core.schedule import BoolArray, LongArray
from penstock.profiler.quiet import quiet_sample

LEAST = 0.3  # seconds of a sample: shorter ones would not show other processes
WARM = 2  # rounds before the first sample
PATIENCE = 2  # times the requested samples, after which disturbed ones are used


Show = Callable[[int, int], None]  # called with the samples taken and the expected total


def no_progress(done: int, total: int) -> None:
    """Show nothing."""


def _alone(data: bytes) -> list[bytes]:
    return [data]


@dataclass(frozen=True)
class Peers:
    """Processes that measure at the same time. `gather` exchanges data with them; `root` is their common ancestor."""

    gather: Callable[[bytes], list[bytes]] = _alone
    root: int | None = None


@dataclass(frozen=True)
class Samples:
    """Rows of figures, the share of the cores that other processes used, and which samples were quiet."""

    figures: FloatArray  # (samples, ...)
    foreign: FloatArray  # as a share of each sample
    quiet: BoolArray
    requested: int

    @property
    def chosen(self) -> LongArray:
        """The requested number of samples, the least disturbed."""
        indices: LongArray = np.sort(
            np.argsort(np.where(self.quiet, 0.0, self.foreign), kind="stable")[: self.requested]
        )
        return indices

    @property
    def used(self) -> FloatArray:
        figures: FloatArray = self.figures[self.chosen]
        return figures

    @property
    def disturbed(self) -> int:
        """The number of used samples that were not quiet."""
        return int((~self.quiet[self.chosen]).sum())


def collect(one: Callable[[], FloatArray], repetitions: int, peers: Peers, show: Show) -> Samples:
    """Take `repetitions` quiet samples, or stop after `PATIENCE` times as many. Each is the mean of rounds of `one`."""
    for _ in range(WARM):
        one()
    figures: list[FloatArray] = []
    disturbances: list[tuple[float, bool]] = []
    while (quiet := sum(calm for _, calm in disturbances)) < repetitions and len(disturbances) < PATIENCE * repetitions:
        show(len(disturbances), min(len(disturbances) + repetitions - quiet, PATIENCE * repetitions))
        peers.gather(b"")
        with quiet_sample(root=peers.root) as sample:
            figures.append(_rounds(one))
        own = json.dumps([sample.foreign / sample.seconds, sample.quiet]).encode()
        every = [json.loads(part) for part in peers.gather(own)]
        disturbances.append((max(foreign for foreign, _ in every), all(calm for _, calm in every)))
    show(len(disturbances), len(disturbances))
    return Samples(
        np.array(figures),
        np.array([foreign for foreign, _ in disturbances]),
        np.array([calm for _, calm in disturbances]),
        repetitions,
    )


def _rounds(one: Callable[[], FloatArray]) -> FloatArray:
    begun, results = perf_counter(), [one()]
    while perf_counter() - begun < LEAST:
        results.append(one())
    mean: FloatArray = np.mean(results, axis=0)
    return mean
