"""A profile's layers in their order, as sums from the front: what a run of layers costs is a subtraction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.core.links import FloatArray
from penstock.core.plan import Plan, StagePlan
from penstock.core.profile import Profile


class LayerSums(NamedTuple):
    """Sums over the layers in front: entry j of an array is that of layers 0 to j - 1."""

    forward: FloatArray
    backward: FloatArray
    parameters: FloatArray
    standing: FloatArray  # bytes that stay: weights, buffers, gradients, optimizer
    kept: FloatArray
    cut: FloatArray  # [j]: bytes that pass between layers j - 1 and j
    sent: FloatArray  # [i, j]: bytes that a stage of layers i to j - 1 sends on; what passes it by has its own links

    @classmethod
    def of(cls, profile: Profile, speed: float = 1.0) -> LayerSums:
        layers = profile.layers
        return cls(
            forward=_sums([layer.forward / speed for layer in layers]),
            backward=_sums([layer.backward / speed for layer in layers]),
            parameters=_sums([layer.parameter_bytes for layer in layers]),
            standing=_sums([2 * x.parameter_bytes + x.buffer_bytes + x.optimizer_bytes for x in layers]),
            kept=_sums([layer.kept_bytes for layer in layers]),
            cut=_crossing(profile),
            sent=_sent(profile),
        )

    @property
    def layers(self) -> int:
        return len(self.forward) - 1


def _sums(values: Sequence[float]) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(values)))


def _crossing(profile: Profile) -> FloatArray:
    """Return the bytes that cross every cut: an output crosses all up to the last layer that uses it."""
    steps = np.zeros(len(profile.layers) + 2)
    for one in profile.outputs:
        steps[one.source + 1] += one.bytes
        steps[max(one.readers) + 1] -= one.bytes
    return np.cumsum(steps)[:-1]


def _sent(profile: Profile) -> FloatArray:
    count = len(profile.layers)
    crosses = np.zeros((count, count + 1))
    for one in profile.outputs:
        crosses[one.source, one.source + 1 : max(one.readers) + 1] += one.bytes
    from_here = np.cumsum(crosses[::-1], axis=0)[::-1]  # [i, j]: outputs of i and later that cross j
    return np.vstack([from_here, np.zeros(count + 1)])


def straight_plan(
    bounds: Sequence[int],
    devices: Sequence[Sequence[int]],
    schedule: str,
    microbatches: int,
    recompute: bool = False,
    options: tuple[tuple[str, object], ...] = (),
) -> Plan:
    """Return a plan of one stage a rank.

    Stage s has layers bounds[s] to bounds[s + 1] - 1, and one replica on each of devices[s].
    """
    stages = tuple(StagePlan(a, b - 1, recompute) for a, b in pairwise(bounds))
    slots = tuple(tuple((int(device),) for device in rank) for rank in devices)
    return Plan(stages, tuple(range(len(stages))), slots, schedule, microbatches, options=options)
