"""balance and gpipe against every way to cut."""

from __future__ import annotations

from random import Random
from statistics import pvariance

import pytest

from penstock import Cluster, InputError, Layer, Level, Profile
from penstock.planners.balance import balance, gpipe
from planners.brute import all_cells, random_profile


def devices(count):
    return Cluster.uniform((Level("link", count, 1e9),))


def cells(outcome):
    layers = outcome.profile.layers
    return [sum(x.seconds for x in layers[stage.first : stage.last + 1]) for stage in outcome.plan.stages]


def test_both_equal_brute_force_on_400_random_lists():
    random = Random(6)
    for _ in range(400):
        layers = random.randint(1, 9)
        count = random.randint(1, layers)
        profile = random_profile(random, layers)
        every = list(all_cells([x.seconds for x in profile.layers], count))
        ours = balance(profile, devices(count), stages=count)
        assert max(cells(ours)) == ours.seconds == min(map(max, every))
        even = gpipe(profile, devices(count), stages=count)
        assert pvariance(cells(even)) == pytest.approx(min(map(pvariance, every)), abs=1e-9)
        assert max(cells(even)) == even.seconds


def test_the_example_that_a_greedy_solver_gets_wrong():
    profile = Profile(tuple(Layer(f"L{at}", cost, 0.0, 0.0) for at, cost in enumerate([100] * 7 + [500])))
    assert balance(profile, devices(2)).seconds == 600


def test_a_speed_shortens_and_devices_bound_the_stages():
    profile = random_profile(Random(1), 5)
    assert len(balance(profile, devices(3)).plan.stages) == 3
    assert len(balance(profile, devices(8)).plan.stages) == 5


@pytest.mark.parametrize("planner", [balance, gpipe])
def test_too_many_stages(planner):
    profile = random_profile(Random(1), 3)
    with pytest.raises(InputError, match="at most 3 stages, one for each layer, but got 4; ask for fewer"):
        planner(profile, devices(8), stages=4)
    with pytest.raises(InputError, match="at most 2 stages, one for each device of the cluster, but got 3"):
        planner(profile, devices(2), stages=3)
    with pytest.raises(InputError, match="at least 1 stage, but got 0"):
        planner(profile, devices(2), stages=0)
