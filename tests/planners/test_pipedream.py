"""PipeDream's programme against brute force, its worked example, and the plan it published for VGG-16."""

from __future__ import annotations

from math import inf
from random import Random

import numpy as np
import pytest

from penstock import Cluster, Device, InputError, Layer, Level, Profile
from penstock.planners.ideals import Ideals
from penstock.planners.levels import CONSTANTS
from penstock.planners.pipedream import pipedream
from penstock.planners.replicate import from_state
from planners.brute import PipeDream, random_profile
from planners.published_profiles import needs_profiles, published


def random_case(random, number):
    """Chains and branches, one level and two, with and without a limit on memory, in turns."""
    profile = random_profile(random, random.randint(1, 6), branching=number % 2 == 1)
    sizes = (random.randint(1, 5),) if number % 4 < 2 else (random.randint(1, 3), random.randint(2, 3))
    levels = tuple(
        Level(f"l{k}", size, random.choice((1, 2, 4, 8)), reduce_bandwidth=random.choice((None, 3.0)))
        for k, size in enumerate(sizes)
    )
    memory = float(random.randint(30, 400)) if number % 3 == 0 else inf
    return profile, levels, memory


def recomputed(outcome, levels, constant):
    """The slowest stage of a plan on one level, from the plan alone."""
    profile, plan = outcome.profile, outcome.plan
    brute = PipeDream(profile, levels, inf, constant)
    times = []
    for stage, replicas in zip(plan.stages, plan.replicas, strict=True):
        layers = profile.layers[stage.first : stage.last + 1]
        seconds, weights = sum(x.seconds for x in layers), sum(x.parameter_bytes for x in layers)
        times.append(brute.stage_seconds(seconds, weights, replicas, levels[0].reduce_rate(replicas)))
        if stage.last < len(profile.layers) - 1:
            times.append(2 * brute.leaving(frozenset(range(stage.last + 1))) / levels[0].bandwidth)
    return max(times)


@pytest.mark.parametrize("constant", CONSTANTS)
def test_equals_brute_force_on_380_random_instances(constant):
    random = Random(f"pipedream {constant}")
    fitted = 0
    for number in range(380):
        profile, levels, memory = random_case(random, number)
        expected = PipeDream(profile, levels, memory, constant).best()
        cluster = Cluster.uniform(levels, Device("d", memory))
        if expected == inf:
            with pytest.raises(InputError, match="a plan that fits"):
                pipedream(profile, cluster, constant=constant)
            continue
        found = pipedream(profile, cluster, constant=constant)
        assert found.seconds == pytest.approx(expected, rel=1e-12)
        assert sorted(d for slot in found.plan.slots for d in slot) == list(range(len(cluster.devices)))
        if len(levels) == 1:
            assert recomputed(found, levels, constant) == pytest.approx(expected, rel=1e-12)
        fitted += 1
    assert fitted >= 300


def test_plain_and_compiled_loops_agree_in_every_bit():
    random = Random(3)
    for number in range(20):
        profile, levels, _ = random_case(random, 4 * number + 1)
        ideals, size = Ideals.of(profile), levels[0].size
        n = len(ideals)
        base = (ideals.seconds[None, :] - ideals.seconds[:, None])[None]
        depth = np.ones((size + 1, size + 1), dtype=np.int64)
        rate = np.arange(size + 1) / 3.0
        answers = []
        for run in (from_state.plain, from_state.compiled):
            best, split, taken = np.zeros((n, size + 1)), *np.zeros((2, n, size + 1), dtype=np.int64)
            most = np.full((n, n), 1, dtype=np.int64)
            which = np.zeros(2, dtype=np.int64)
            inputs = (0, ideals.below, base, which, most, depth, ideals.parameters, rate, number % 2 == 0, ideals.cut)
            run(*inputs, best, split, taken)
            answers.append((best.tobytes(), split.tobytes(), taken.tobytes()))
        assert answers[0] == answers[1]


FOUR = [(30, 60, 8e6, 1e6), (20, 40, 4e6, 1e6), (10, 20, 2e6, 1e6), (15, 30, 1e5, 2e8)]  # ms, ms, bytes, bytes


def worked_example():
    return Profile(
        tuple(
            Layer(f"L{at}", f / 1e3, b / 1e3, 0.0, output_bytes=a, parameter_bytes=w)
            for at, (f, b, a, w) in enumerate(FOUR, start=1)
        )
    )


@pytest.mark.parametrize(
    ("bandwidth", "constant", "seconds"), [(1e9, "paper", 0.060), (1e9, "code", 0.0626667), (1e8, "paper", 0.060)]
)
def test_the_worked_example(bandwidth, constant, seconds):
    found = pipedream(worked_example(), Cluster.uniform((Level("link", 4, bandwidth),)), constant=constant)
    assert found.seconds == pytest.approx(seconds, rel=1e-6)
    assert (found.plan.cuts, found.plan.replicas) == ((3,), (3, 1))
    assert found.plan.devices == (((0,), (1,), (2,)), ((3,),))


def test_inside_a_host_first():
    """Two hosts of two: the slow level between them carries the small cut, the fast one the replicas."""
    layers = tuple(
        Layer(f"L{at}", 1.0, 0.0, 0.0, output_bytes=b, parameter_bytes=8) for at, b in enumerate((9, 1, 9, 9))
    )
    cluster = Cluster.uniform((Level("fast", 2, 100.0), Level("slow", 2, 2.0)))
    found = pipedream(Profile(layers), cluster)
    assert (found.plan.cuts, found.plan.replicas, found.seconds) == ((2,), (2, 2), 1.0)
    assert found.plan.devices == (((0,), (1,)), ((2,), (3,)))


def test_memory_forbids_what_time_prefers():
    """Weights of 10 a layer: two replicas of the whole are fastest, but a device holds one layer's versions only."""
    layers = tuple(Layer(f"L{at}", 1.0, 0.0, 0.0, output_bytes=1, parameter_bytes=10) for at in range(2))
    link = (Level("link", 2, 20.0),)
    free = pipedream(Profile(layers), Cluster.uniform(link), constant="text")
    assert free.plan.replicas == (2,)
    tight = pipedream(Profile(layers), Cluster.uniform(link, Device("d", 30.0)), constant="text")
    assert tight.plan.replicas == (1, 1)
    ignored = pipedream(Profile(layers), Cluster.uniform(link, Device("d", 30.0)), constant="text", memory=False)
    assert ignored.plan == free.plan


def test_a_branch_is_cut_off_whole_and_the_layers_reordered():
    """Outputs in the middle of the two branches are large, and so are the weights: each branch stays in one piece.

    0 ─┬─ 1 ═ 3 ─┬─ 5
       └─ 2 ═ 4 ─┘
    """
    figures = zip((1, 4, 4, 4, 4, 1), (1, 1e6, 1e6, 1, 1, 1), strict=True)
    layers = tuple(
        Layer(f"L{at}", t, 0.0, 0.0, output_bytes=b, parameter_bytes=1e6) for at, (t, b) in enumerate(figures)
    )
    edges = ((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5))
    found = pipedream(Profile(layers, edges), Cluster.uniform((Level("link", 2, 1e3),)))
    assert found.seconds == 9
    stages = [{x.name for x in found.profile.layers[s.first : s.last + 1]} for s in found.plan.stages]
    assert stages in ([{"L0", "L1", "L3"}, {"L2", "L4", "L5"}], [{"L0", "L2", "L4"}, {"L1", "L3", "L5"}])
    assert found.profile.crossing(found.plan.cuts) == {(0, 1): 2}
    assert pipedream(Profile(layers, edges), Cluster.uniform((Level("link", 2, 1e3),)), graph="chain").seconds > 9


def test_bad_input():
    cluster = Cluster.uniform((Level("link", 4, 1e9),), Device("d", 1e8))
    with pytest.raises(InputError, match="constant to be one of paper, text, code, but got 'best'"):
        pipedream(worked_example(), cluster, constant="best")
    with pytest.raises(InputError, match="graph to be branching or chain, but got 'tree'"):
        pipedream(worked_example(), cluster, graph="tree")
    with pytest.raises(InputError, match=r"a plan that fits 0\.1 GB a device on 4 device.*GB short; what would fit"):
        pipedream(worked_example(), cluster)


def test_a_graph_too_wide_is_refused_with_a_way_out():
    layers = tuple(Layer(f"L{at}", 1.0, 0.0, 0.0) for at in range(16))
    wide = Profile(layers, tuple((at, 15) for at in range(15)))
    cluster = Cluster.uniform((Level("link", 2, 1e9),))
    with pytest.raises(InputError, match=r"at most 6000 states .* pass graph='chain'"):
        pipedream(wide, cluster)
    assert pipedream(wide, cluster, graph="chain").seconds == 8


@needs_profiles
@pytest.mark.parametrize(("constant", "replicas"), [("paper", (15, 1)), ("code", (15, 1)), ("text", (16,))])
def test_vgg16_on_16_workers(constant, replicas):
    found = pipedream(published("vgg16"), Cluster.uniform((Level("link", 16, 3.125e9),)), constant=constant)
    assert found.plan.replicas == replicas
    if constant == "code":
        assert found.seconds == pytest.approx(0.0455, abs=5e-5)
        last = found.profile.layers[found.plan.cuts[0] :]
        assert sum("Conv2d" in layer.name for layer in last) == 2  # the last two, and all that follows
