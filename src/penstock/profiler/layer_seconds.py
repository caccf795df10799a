"""Compute the seconds of layers from the seconds of stages that hold one layer each.

A stage takes some time beside its layers: it runs the code around them, seeds, and sends. With one stage for each
layer, this overhead is counted once for each layer. A second measurement of the model in two stages gives its size: the
difference of the totals is due to the additional stages. The layers of each half are then scaled to add up to the time
of that stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.core.links import FloatArray
from penstock.core.profile import PerStage
from penstock.core.schedule import LongArray

# DEFERRING: a forward whose weight gradients are computed later
OPERATIONS = FORWARD, BACKWARD, DEFERRING, INPUT, WEIGHT = range(5)


class LayerSeconds(NamedTuple):
    """Seconds by layer, and the overhead of a stage."""

    forward: FloatArray
    backward: FloatArray
    input_grad: FloatArray
    weight_grad: FloatArray
    spread: FloatArray
    per_stage: PerStage
    middle_half: LongArray  # the samples of which all but the spread are means


def layer_seconds(fine: FloatArray, coarse: FloatArray | None, cut: int = 0) -> LayerSeconds:
    """Return the seconds of layers. `fine` has shape (samples, 5 operations, layers); `coarse` has shape (samples, 5,
    2), of the same model in two stages, the second of which begins at layer `cut`; None with at most two layers."""
    kept = middle_half(fine, coarse)
    seconds: FloatArray = fine[kept].mean(axis=0)
    own = np.zeros(len(OPERATIONS))
    if coarse is not None:
        two: FloatArray = coarse[kept].mean(axis=0)
        own = _own(seconds, two)
        seconds = _fitted(seconds, own, two, cut)
    # The additional time of a forward with deferred weight gradients is counted with the input gradient.
    deferring = np.maximum(seconds[DEFERRING] - seconds[FORWARD], 0.0)
    backward = seconds[BACKWARD]
    weight_grad = np.minimum(seconds[WEIGHT], backward)
    input_grad = seconds[INPUT] + deferring
    return LayerSeconds(
        forward=seconds[FORWARD],
        backward=backward,
        input_grad=np.maximum(input_grad, backward - weight_grad),  # separately, they never take less than together
        weight_grad=weight_grad,
        spread=_spread(fine[:, (FORWARD, BACKWARD)].sum(axis=1)),
        per_stage=PerStage(float(own[FORWARD]), float(own[BACKWARD])),
        middle_half=kept,
    )


def middle_half(fine: FloatArray, coarse: FloatArray | None) -> LongArray:
    """Return the middle half of the samples by length. Their mean contains the slow moments of every step, which a
    median of each figure would leave out, but no outliers, which would move the mean of all."""
    length = fine.sum(axis=(1, 2)) + (0.0 if coarse is None else coarse.sum(axis=(1, 2)))
    quarter = len(length) // 4
    indices: LongArray = np.argsort(length, kind="stable")[quarter : len(length) - quarter]
    return indices


def _own(seconds: FloatArray, two: FloatArray) -> FloatArray:
    """Return the overhead of a stage in each operation."""
    more = np.maximum((seconds.sum(axis=1) - two.sum(axis=1)) / (seconds.shape[1] - 2), 0.0)
    # It cannot exceed the time of the lightest layer's stage, though noise may suggest it.
    forward, backward = np.minimum(more, seconds.min(axis=1))[[FORWARD, BACKWARD]]
    overhead = np.zeros(len(OPERATIONS))
    overhead[[FORWARD, DEFERRING]], overhead[[BACKWARD, INPUT]] = forward, backward
    return overhead


def _fitted(seconds: FloatArray, own: FloatArray, two: FloatArray, cut: int) -> FloatArray:
    """Scale the layers of each of the two stages to add up to its seconds without the overhead."""
    left = np.maximum(seconds - own[:, None], 0.0)
    parts = []
    for half, layers in enumerate((left[:, :cut], left[:, cut:])):
        total, whole = layers.sum(axis=1), np.maximum(two[:, half] - own, 0.0)
        even = np.broadcast_to(whole[:, None] / layers.shape[1], layers.shape)  # where no layer takes measurable time
        parts.append(np.where(total[:, None] > 0, layers * (whole / np.maximum(total, 1e-12))[:, None], even))
    return np.concatenate(parts, axis=1)


def _spread(seconds: FloatArray) -> FloatArray:
    low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75), axis=0)
    spread: FloatArray = (high - low) / np.maximum(middle, 1e-12)
    return spread
