"""What `auto` refuses, and that one clear message says what to do."""

from __future__ import annotations

import math

import pytest

from penstock import InputError
from penstock.core.cost import flat_costs
from penstock.schedules.registry import schedule


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0.5}, r"memory of at least 1 on rank 0.*got 0\.5; raise memory to 1 or more"),
        ({"memory": [2, 2, 0.25]}, r"at least 1 on rank 2.*got 0\.25"),
        ({"memory": math.nan}, r"memory to be above 0.*nan"),
        ({"memory": -1}, r"memory to be above 0.*-1"),
        ({"memory": 0}, r"memory to be above 0"),
        ({"memory": [1, 2]}, r"memory to be one number or one for each of 3 ranks.*\[1\.0, 2\.0\]"),
        ({"forward": math.nan}, r"forward to be finite and 0 or more"),
        ({"weight_grad": [1, -1, 1]}, r"weight_grad to be finite and 0 or more"),
        ({"input_grad": [1, 2]}, r"input_grad to be one number or one for each of 3 stages"),
        ({"transfer": [1, 2, 3, 4, 5]}, r"transfer to be one number"),
        ({"weight_grad_memory": 2}, r"weight_grad_memory to be a fraction"),
        ({"placement": "w"}, r"placement for 1 chunk\(s\) a rank to be 'straight' or 'interleaved'.*'w'"),
        ({"placement": "v"}, r"'v' 2"),
        ({"placement": "straight", "chunks": 2}, r"'v' or 'interleaved'.*'straight'"),
        ({"placement": "v", "chunks": 3}, r"to be 'interleaved'"),
        ({"effort": -1}, r"effort to be a whole number of at least 0.*-1"),
        ({"seed": 0.5}, r"seed to be a whole number.*0\.5"),
        ({"costs": 3}, r"costs of 3 stages on 3 slots, but got 3"),
        ({"speed": 3}, "arguments that schedule takes, but got 'speed'"),
    ],
)
def test_one_clear_message(options, message):
    with pytest.raises(InputError, match=message):
        schedule("auto", stages=3, microbatches=4, **options)


def test_more_than_can_be_searched_is_refused_at_once():
    """It was searched for hours."""
    with pytest.raises(InputError, match=r"at most 1,000,000 forwards and backwards for auto.*got 80,000,"):
        schedule("auto", stages=4, microbatches=10_000_000)


def test_costs_of_another_shape_or_beside_numbers():
    costs = flat_costs(schedule("1f1b", stages=2, microbatches=4).shape)
    with pytest.raises(InputError, match="costs of 3 stages on 3 slots, but got costs of 2 stages"):
        schedule("auto", stages=3, microbatches=4, costs=costs)
    with pytest.raises(InputError, match="costs and forward"):
        schedule("auto", stages=2, microbatches=4, costs=costs, forward=2)


def test_the_least_memory_is_enough():
    """What the message asks for works, on every placement."""
    for chunks, placement in ((1, "straight"), (2, "v"), (2, "interleaved"), (3, "interleaved")):
        schedule("auto", stages=3, microbatches=4, chunks=chunks, placement=placement, memory=1, effort=20)
