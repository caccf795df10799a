"""Timed transfers of several sizes as a line: seconds = latency + bytes / bandwidth.

Least squares of the relative errors of the medians: with absolute ones the largest size would decide alone, and the
latency would be what is left of its noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

import numpy as np

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
