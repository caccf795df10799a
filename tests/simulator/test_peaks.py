"""The most that a slot holds, found in one pass, is the highest level of all rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock import schedule
from penstock.core.check import prove
from penstock.core.cost import flat_costs
from penstock.core.peaks import peaks
from penstock.schedules.registry import METHODS
from penstock.simulator.simulate import simulate_costs

NAMES = [name for name in METHODS if name != "auto"]


def random_costs(shape, dice):
    """Stages that keep, recompute or offload, of sizes that add up to the same number in no two ways."""
    kept = dice.random(shape.stages)
    less, copied = kept * dice.random((2, shape.stages)), dice.random(shape.stages) < 0.4
    costs = flat_costs(shape)
    weights, gradients, optimizer = dice.random((3, shape.stages))
    foot = replace(
        costs.footprint,
        activations=kept,
        until_weight=less[0],
        inputs=less[1],
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
    )
    return replace(
        costs, footprint=foot, recompute=dice.random(shape.stages) < 0.4, host_copy=dice.random(shape.stages) * copied
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("replicas", [1, (2, 1, 3)])
def test_one_pass_finds_what_the_rows_say(name, replicas):
    turns = METHODS[name].asynchronous and name != "2bw"
    built = schedule(name, stages=3, microbatches=2 if turns else 6, batches=5, replicas=replicas)
    full, dice = prove(built).schedule, np.random.default_rng(7)
    for _ in range(5):
        costs = random_costs(full.shape, dice)
        memory = simulate_costs(full, costs).memory
        assert peaks(full, costs) == pytest.approx(memory.peak(full), rel=1e-12)
