"""A sweep: the grid of its file's drawing, read down and then right, also where most of the grid is empty."""

from __future__ import annotations

import pytest

from penstock.core.action import Op
from penstock.schedules.program import sweep


def by_the_drawing(microbatches, *ahead):
    steps = range(-max(d for _, d in ahead), microbatches - min(d for _, d in ahead))
    return [(int(op), step + d) for step in steps for op, d in ahead if 0 <= step + d < microbatches]


@pytest.mark.parametrize("microbatches", [1, 2, 5, 12])
@pytest.mark.parametrize(
    "ahead",
    [
        [(Op.F, 3), (Op.B, 0)],
        [(Op.F, 0), (Op.B, 0)],
        [(Op.F, 7), (Op.I, 0), (Op.W, -4)],
        [(Op.F, 1000), (Op.B, 0)],
        [(Op.F, 100), (Op.I, 0), (Op.W, -100)],
    ],
)
def test_the_order_is_that_of_the_drawing(microbatches, ahead):
    program = sweep(7, microbatches, *ahead)
    assert list(zip(program.op.tolist(), program.microbatch.tolist(), strict=True)) == by_the_drawing(
        microbatches, *ahead
    )
    assert set(program.stage.tolist()) == {7}
