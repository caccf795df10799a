"""The break-down of a step: each part has its own cause, and they add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import breakdown, schedule, simulate
from penstock.core.cost import flat_costs

seconds = st.floats(0.125, 4.0)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v", "2bw"]),
    st.integers(1, 4),
    st.data(),
)
def test_the_parts_add_up_to_the_makespan(name, p, data):
    built = schedule(name, stages=p, microbatches=2 * p, replicas=data.draw(st.integers(1, 2)))
    numbers = {
        "forward": data.draw(st.lists(seconds, min_size=p, max_size=p)),
        "input_grad": data.draw(seconds),
        "transfer": data.draw(seconds),
        "update": data.draw(seconds),
        "reduce": data.draw(seconds),
        "recompute": data.draw(st.booleans()),
    }
    parts = breakdown(built, flat_costs(built.shape, **numbers))
    assert parts.makespan == pytest.approx(simulate(built, **numbers).makespan)
    assert sum(parts.shares().values()) == pytest.approx(1.0)
    assert min(parts.to_json().values()) >= 0


def test_an_order_made_for_unequal_stages_has_no_negative_imbalance():
    """On equal stages it is slower than on its own."""
    costs = {"forward": [1, 1.4, 1, 0.8]}
    built = schedule("auto", stages=4, microbatches=12, chunks=1, memory=4, **costs)
    assert simulate(built, forward=1.05).makespan > simulate(built, **costs).makespan
    parts = breakdown(built, flat_costs(built.shape, **costs))
    assert (parts.imbalance, parts.makespan) == (0.0, pytest.approx(simulate(built, **costs).makespan))


def test_each_cause_shows_up_in_its_own_part():
    built = schedule("gpipe", stages=2, microbatches=4, replicas=2)

    def parts(**numbers):
        return breakdown(
            built, flat_costs(built.shape, **({"forward": 2, "input_grad": 2, "weight_grad": 2} | numbers))
        )

    plain = parts()
    assert (plain.compute, plain.bubble) == (12.0, 3.0)
    assert (plain.imbalance, plain.recompute, plain.transfer, plain.reduction, plain.update) == (0, 0, 0, 0, 0)
    assert parts(transfer=1.0).transfer > 0
    assert parts(reduce=1.0).reduction == 1.0
    assert parts(update=1.0).update == 1.0
    again = parts(recompute=True)
    assert (again.recompute, again.bubble) == (5.0, 3.0)
    uneven = parts(forward=[1, 3])
    assert uneven.compute == plain.compute
    assert uneven.imbalance > 0
    assert uneven.bubble == plain.bubble
