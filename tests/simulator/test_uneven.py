"""Runs of uneven actions: no longer plain, repeatable, and never shorter than what their means say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Cluster, Layer, Level, Profile, schedule, simulate
from penstock.app.plan.predict import predict
from penstock.core.plan import Plan, StagePlan
from penstock.planners.outcome import PlanOutcome
from penstock.simulator.uneven import uneven_makespan

NAMES = ("gpipe", "1f1b", "zb-h1")


@given(
    name=st.sampled_from(NAMES),
    stages=st.integers(1, 4),
    microbatches=st.integers(4, 8),
    forward=st.floats(0.1, 2.0),
    transfer=st.floats(0.0, 1.0),
    jitter=st.floats(0.0, 2.0),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_no_shorter_than_the_means_and_the_same_again(name, stages, microbatches, forward, transfer, jitter, seed):
    built = schedule(name, stages=stages, microbatches=microbatches)
    line = simulate(built, forward=forward, transfer=transfer)
    found = uneven_makespan(line, jitter, seed)
    assert found >= line.makespan * (1 - 1e-12)
    assert found == uneven_makespan(line, jitter, seed)
    assert uneven_makespan(line, 0.0, seed) == line.makespan  # to the bit


def test_a_rank_alone_takes_the_sum_whatever_the_spread():
    line = simulate(schedule("1f1b", stages=1, microbatches=8))
    assert uneven_makespan(line, 0.3) == pytest.approx(line.makespan)


def test_ranks_that_wait_for_each_other_lose_more_the_more_uneven_they_are():
    line = simulate(schedule("1f1b", stages=4, microbatches=16))
    found = [uneven_makespan(line, jitter) / line.makespan for jitter in (0.0, 0.05, 0.1, 0.2)]
    assert found == sorted(found)
    assert 1.0 == found[0] < found[1] < found[-1] < 1.5


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "2bw"])
def test_a_profile_says_how_uneven_and_plans_are_predicted_by_that(name):
    layers = tuple(Layer(str(at), 1.0, 1.0, 1.0) for at in range(4))
    shape = schedule(name, stages=2, microbatches=8).shape
    size = 4 // shape.stages
    stages = tuple(StagePlan(at * size, (at + 1) * size - 1) for at in range(shape.stages))
    plan = Plan(stages, shape.placement, tuple(((rank,),) for rank in range(2)), name, 8)
    cluster = Cluster.uniform((Level("link", 2, 1e9),))
    even, uneven = (
        predict(PlanOutcome("balance", plan, Profile(layers, jitter=jitter), 0.0), cluster) for jitter in (0.0, 0.2)
    )
    assert 1.01 < uneven.step_seconds / even.step_seconds < 1.3
    np.testing.assert_array_equal(uneven.timeline.end, even.timeline.end)  # actions at their means
