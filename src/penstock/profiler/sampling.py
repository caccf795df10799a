"""Samples of a measurement, taken until enough of them were quiet.

Several processes may measure at the same time, to load the machine as a pipeline's ranks will; they begin each sample
together, and one that was disturbed for one of them counts as disturbed for all.
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

LEAST = 0.3  # seconds of a sample: less would not show who else was there
WARM = 2  # rounds before the first sample
PATIENCE = 2  # times as many samples as are wanted, before noisy ones must do


Show = Callable[[int, int], None]  # told how many samples there are, of how many that will be


def unseen(done: int, total: int) -> None:
    """Nobody watches."""


def _alone(data: bytes) -> list[bytes]:
    return [data]


@dataclass(frozen=True)
class Company:
    """Others that measure at the same time. `gather` meets them; `root` is the process that all descend from."""

    gather: Callable[[bytes], list[bytes]] = _alone
    root: int | None = None


@dataclass(frozen=True)
class Samples:
    """Rows of figures; how much others had of the cores, and which were quiet."""

    figures: FloatArray  # (samples, ...)
    foreign: FloatArray  # as a share of each sample
    quiet: BoolArray
    wanted: int

    @property
    def chosen(self) -> LongArray:
        """As many as were wanted, the least disturbed."""
        found: LongArray = np.sort(np.argsort(np.where(self.quiet, 0.0, self.foreign), kind="stable")[: self.wanted])
        return found

    @property
    def used(self) -> FloatArray:
        kept: FloatArray = self.figures[self.chosen]
        return kept

    @property
    def disturbed(self) -> int:
        """How many of the used ones were not quiet."""
        return int((~self.quiet[self.chosen]).sum())


def collect(one: Callable[[], FloatArray], repetitions: int, company: Company, show: Show) -> Samples:
    """That many quiet samples, or what `PATIENCE` times as many give. Each is the mean of rounds of `one`."""
    for _ in range(WARM):
        one()
    figures: list[FloatArray] = []
    told: list[tuple[float, bool]] = []
    while (quiet := sum(calm for _, calm in told)) < repetitions and len(told) < PATIENCE * repetitions:
        show(len(told), min(len(told) + repetitions - quiet, PATIENCE * repetitions))
        company.gather(b"")
        with quiet_sample(root=company.root) as sample:
            figures.append(_rounds(one))
        mine = json.dumps([sample.foreign / sample.seconds, sample.quiet]).encode()
        every = [json.loads(part) for part in company.gather(mine)]
        told.append((max(foreign for foreign, _ in every), all(calm for _, calm in every)))
    show(len(told), len(told))
    return Samples(
        np.array(figures), np.array([foreign for foreign, _ in told]), np.array([calm for _, calm in told]), repetitions
    )


def _rounds(one: Callable[[], FloatArray]) -> FloatArray:
    begun, found = perf_counter(), [one()]
    while perf_counter() - begun < LEAST:
        found.append(one())
    mean: FloatArray = np.mean(found, axis=0)
    return mean
