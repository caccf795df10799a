"""Whatever costs, memory, placement and replicas `auto` is given, its schedule obeys every law and its cap."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import check, lower, schedule
from penstock.core.cost import flat_costs

seconds = st.floats(0.125, 4.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 8), st.sampled_from([1, 2, 3]), st.data())
def test_sound_and_within_its_cap(p, m, chunks, data):
    costs = {
        name: data.draw(st.lists(seconds, min_size=p, max_size=p)) for name in ("forward", "input_grad", "weight_grad")
    }
    costs["transfer"] = data.draw(st.floats(0, 2))
    memory = data.draw(st.sampled_from([None, float(2 * p), float(p)]))
    built = schedule(
        "auto",
        stages=p,
        microbatches=m,
        chunks=chunks,
        batches=data.draw(st.integers(1, 2)),
        replicas=data.draw(st.integers(1, 2)),
        effort=60,
        **costs,
        **({} if memory is None else {"memory": memory}),
    )
    cap = None if memory is None else memory * (1 + 1e-9)
    report = check(built, memory=cap, costs=flat_costs(built.shape, **costs))
    assert report.ok, str(report)
    assert check(lower(built)).ok
