"""Seconds of layers from the seconds of stages that hold one layer each.

A stage takes some time for itself, whatever it holds: it runs the code around the layers, seeds, and hands on. A stage
of many layers takes it once. How much it is, the same model cut in two tells: what one stage a layer takes more, each
of the stages more has taken for itself. The layers of each half then add up to what that stage takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.core.links import FloatArray
from penstock.core.profile import PerStage
from penstock.core.schedule import LongArray

OPERATIONS = FORWARD, BACKWARD, DEFERRING, INPUT, WEIGHT = range(
    5
)  # DEFERRING: a forward that leaves weight gradients for later


class Settled(NamedTuple):
    """By layer, and what a stage takes beside them."""

    forward: FloatArray
    backward: FloatArray
    input_grad: FloatArray
    weight_grad: FloatArray
    spread: FloatArray
    per_stage: PerStage
    usual: LongArray  # the samples that all but the spread are means of


def settled(fine: FloatArray, coarse: FloatArray | None, cut: int = 0) -> Settled:
    """`fine` has (samples, 5 operations, layers), `coarse` (samples, 5, 2) of the same model in two stages, of which
    the second begins at layer `cut`; None where the layers are two stages or fewer."""
    kept = usual(fine, coarse)
    seconds: FloatArray = fine[kept].mean(axis=0)
    own = np.zeros(len(OPERATIONS))
    if coarse is not None:
        two: FloatArray = coarse[kept].mean(axis=0)
        own = _own(seconds, two)
        seconds = _fitted(seconds, own, two, cut)
    # What the forward takes longer where weight gradients are to come later is counted with the input gradient.
    deferring = np.maximum(seconds[DEFERRING] - seconds[FORWARD], 0.0)
    backward = seconds[BACKWARD]
    weight_grad = np.minimum(seconds[WEIGHT], backward)
    input_grad = seconds[INPUT] + deferring
    return Settled(
        forward=seconds[FORWARD],
        backward=backward,
        input_grad=np.maximum(input_grad, backward - weight_grad),  # apart, they never take less than together
        weight_grad=weight_grad,
        spread=_spread(fine[:, (FORWARD, BACKWARD)].sum(axis=1)),
        per_stage=PerStage(float(own[FORWARD]), float(own[BACKWARD])),
        usual=kept,
    )


def usual(fine: FloatArray, coarse: FloatArray | None) -> LongArray:
    """The middle half of the samples by length. Their mean has the slow moments that every step has some of, which a
    median of each figure would leave out, and none of an odd sample, which would move the mean of all."""
    length = fine.sum(axis=(1, 2)) + (0.0 if coarse is None else coarse.sum(axis=(1, 2)))
    quarter = len(length) // 4
    found: LongArray = np.argsort(length, kind="stable")[quarter : len(length) - quarter]
    return found


def _own(seconds: FloatArray, two: FloatArray) -> FloatArray:
    """What a stage takes for itself in each operation."""
    more = np.maximum((seconds.sum(axis=1) - two.sum(axis=1)) / (seconds.shape[1] - 2), 0.0)
    # The lightest layer's stage takes it too: noise may say more than that, but it cannot be.
    forward, backward = np.minimum(more, seconds.min(axis=1))[[FORWARD, BACKWARD]]
    found = np.zeros(len(OPERATIONS))
    found[[FORWARD, DEFERRING]], found[[BACKWARD, INPUT]] = forward, backward
    return found


def _fitted(seconds: FloatArray, own: FloatArray, two: FloatArray, cut: int) -> FloatArray:
    """The layers of each of the two stages add up to what it takes, less its own."""
    left = np.maximum(seconds - own[:, None], 0.0)
    parts = []
    for half, layers in enumerate((left[:, :cut], left[:, cut:])):
        total, whole = layers.sum(axis=1), np.maximum(two[:, half] - own, 0.0)
        even = np.broadcast_to(whole[:, None] / layers.shape[1], layers.shape)  # where no layer is known to take any
        parts.append(np.where(total[:, None] > 0, layers * (whole / np.maximum(total, 1e-12))[:, None], even))
    return np.concatenate(parts, axis=1)


def _spread(seconds: FloatArray) -> FloatArray:
    low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75), axis=0)
    found: FloatArray = (high - low) / np.maximum(middle, 1e-12)
    return found
