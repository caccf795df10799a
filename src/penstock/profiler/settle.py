"""Seconds of layers from the seconds of stages that hold one layer each.

A stage takes some time for itself, whatever it holds: it runs the code around the layers, seeds, and hands on. A stage
of many layers takes it once. How much it is, the same model cut in two tells: what one stage a layer takes more, each
of the stages more has taken for itself. The layers then add up to what the two stages take.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.core.links import FloatArray
from penstock.core.profile import PerStage

FORWARD, BACKWARD, DEFERRING, INPUT, WEIGHT = range(5)  # DEFERRING: a forward that leaves weight gradients for later


class Settled(NamedTuple):
    """By layer, and what a stage takes beside them."""

    forward: FloatArray
    backward: FloatArray
    input_grad: FloatArray
    weight_grad: FloatArray
    spread: FloatArray
    per_stage: PerStage


def settled(fine: FloatArray, coarse: FloatArray | None) -> Settled:
    """`fine` has (samples, 5 operations, layers), `coarse` (samples, forward and backward) of the same model in two
    stages; None where the layers are two stages or fewer."""
    seconds: FloatArray = np.median(fine, axis=0)
    own = np.zeros(2)
    scale = np.ones(2)
    if coarse is not None:
        more = np.median(fine[:, (FORWARD, BACKWARD)].sum(axis=2) - coarse, axis=0)
        # The lightest layer's stage takes it too: noise may say more than that, but it cannot be.
        own = np.minimum(np.maximum(more, 0.0) / (fine.shape[2] - 2), seconds[[FORWARD, BACKWARD]].min(axis=1))
        left = np.maximum(seconds[[FORWARD, BACKWARD]] - own[:, None], 0.0).sum(axis=1)
        scale = np.maximum(np.median(coarse, axis=0) - 2 * own, 0.0) / np.maximum(left, 1e-12)
    # What the forward takes longer where weight gradients are to come later is counted with the input gradient.
    deferring = np.maximum(seconds[DEFERRING] - seconds[FORWARD], 0.0) * scale[0]
    backward = np.maximum(seconds[BACKWARD] - own[1], 0.0) * scale[1]
    weight_grad = np.minimum(seconds[WEIGHT] * scale[1], backward)
    input_grad = np.maximum(seconds[INPUT] - own[1], 0.0) * scale[1] + deferring
    return Settled(
        forward=np.maximum(seconds[FORWARD] - own[0], 0.0) * scale[0],
        backward=backward,
        input_grad=np.maximum(input_grad, backward - weight_grad),  # apart, they never take less than together
        weight_grad=weight_grad,
        spread=_spread(fine[:, (FORWARD, BACKWARD)].sum(axis=1)),
        per_stage=PerStage(float(own[0]), float(own[1])),
    )


def _spread(seconds: FloatArray) -> FloatArray:
    low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75), axis=0)
    found: FloatArray = (high - low) / np.maximum(middle, 1e-12)
    return found
