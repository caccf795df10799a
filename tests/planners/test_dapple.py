"""DAPPLE's latency, placements and search: tables, brute force, and the plans it published."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from penstock import Cluster, Device, InputError, Level, schedule, simulate
from penstock.core.cluster_file import read_cluster
from penstock.core.cost import plan_costs
from penstock.core.group_costs import group_all_reduce, group_transfer
from penstock.core.shape import common_rows
from penstock.planners import dapple_search
from penstock.planners.balance import balance
from penstock.planners.chain import straight_plan
from penstock.planners.dapple import dapple
from penstock.planners.dapple_devices import placements, rest
from penstock.planners.scaled import scaled
from planners.brute import random_profile
from planners.brute_dapple import exhaustive, price, recursion
from planners.latency import latency
from planners.published_profiles import needs_profiles, published


def extended(compute, links):
    """Stages with the transfers between them."""
    return [x for pair in zip(compute, [*links, None], strict=True) for x in pair][:-1]


@pytest.mark.parametrize(
    ("forward", "backward", "links", "microbatches", "reduce", "expected"),
    [
        ([1, 1], [2, 2], [0], 4, [0, 0], 15),
        ([1, 1], [2, 2], [0.5], 8, [3, 3], 31),
        ([2, 1], [4, 2], [0.1], 6, [5, 1], 41),
        ([1, 1.5, 1], [2, 3, 2], [0.2, 0.2], 8, [4, 4, 10], 43.4),
    ],
)
def test_the_table_of_latencies(forward, backward, links, microbatches, reduce, expected):
    lists = (extended(forward, links), extended(backward, links), extended(reduce, [0] * len(links)))
    assert latency(*lists, microbatches).total == pytest.approx(expected)


def test_three_placements():
    """Two machines of four, three devices of the first in use, two wanted."""
    assert list(placements((3, 0), 4, 2)) == [((3, 2), (4, 5)), ((4, 1), (3, 4))]  # fresh; append and scatter agree
    assert list(placements((1, 0), 4, 3)) == [((1, 3), (4, 5, 6)), ((4, 0), (1, 2, 3)), ((3, 1), (1, 2, 4))]
    assert rest((1, 3), 4) == (1, 2, 3, 7)


def random_case(random):
    profile = random_profile(random, random.randint(1, 4), branching=random.random() < 0.3)
    sizes = random.choice(((4,), (2, 2), (1, 4), (3, 1), (3,), (1, 3)))
    levels = tuple(
        Level(f"l{k}", n, random.choice((1, 4, 16)), random.choice((0, 0.5)), random.choice((None, 8.0)), False, k == 0)
        for k, n in enumerate(sizes)
    )
    return profile, levels, random.randint(1, 8)


def placed_of(plan):
    """Where each stage ends, and its devices."""
    stages = zip(plan.stages, plan.devices, strict=True)
    return [(stage.last + 1, tuple(d for (d,) in mine)) for stage, mine in stages]


def test_the_search_equals_brute_force_on_340_random_instances():
    random = Random("dapple")
    fitted, best_of_the_published = 0, 0
    for number in range(340):
        profile, levels, microbatches = random_case(random)
        memory = float(random.randint(100, 300)) if number % 5 == 0 else inf
        cluster = Cluster.uniform(levels, Device("d", memory))
        expected = exhaustive(profile, cluster, microbatches)
        if expected == inf:
            with pytest.raises(InputError, match="a plan that fits"):
                dapple(profile, cluster, microbatches=microbatches, keep=None)
            continue
        for keep in (None, 32):
            found = dapple(profile, cluster, microbatches=microbatches, keep=keep)
            assert found.seconds == pytest.approx(expected, rel=1e-9)
        assert price(profile, cluster, microbatches, placed_of(found.plan)) == pytest.approx(expected, rel=1e-9)
        if memory == inf:
            alone = dapple(profile, cluster, microbatches=microbatches, keep=1).seconds
            best_of_the_published += alone == pytest.approx(expected, rel=1e-9)
        fitted += 1
    assert fitted >= 300
    assert best_of_the_published >= 260  # one prefix a state, as published: of the 272 without a limit on memory


def test_keeping_one_prefix_equals_the_published_recursion_on_300_random_instances():
    random = Random("recursion")
    for _ in range(300):
        profile, levels, microbatches = random_case(random)
        cluster = Cluster.uniform(levels)
        found = dapple(profile, cluster, microbatches=microbatches, keep=1)
        assert found.seconds == pytest.approx(recursion(profile, cluster, microbatches), rel=1e-9)


def test_the_prefixes_that_a_large_search_leaves_out_lose_nothing_here(monkeypatch):
    """Three machines of three, ten layers: with all prefixes of a state, and with a width that cuts most of them."""
    random = Random("width")
    for _ in range(6):
        profile = random_profile(random, 10)
        cluster = Cluster.uniform((Level("in", 3, 16.0, reduce_rings=True), Level("out", 3, 2.0, 0.1, 4.0)))
        found = []
        for width in (10**9, 64):
            monkeypatch.setattr(dapple_search, "WIDTH", width)
            monkeypatch.setattr(dapple_search, "FEWEST", width)
            found.append(dapple(profile, cluster, microbatches=16).seconds)
        assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_machines_joined_at_three_levels():
    """Who shares a rack matters then: brute force again."""
    random = Random("racks")
    for _ in range(20):
        profile = random_profile(random, 4)
        cluster = Cluster.uniform((Level("in", 1, 8.0), Level("rack", 2, 4.0, 0.1), Level("out", 2, 1.0, 0.5)))
        found = dapple(profile, cluster, microbatches=3, keep=None)
        assert found.seconds == pytest.approx(exhaustive(profile, cluster, 3), rel=1e-9)


def test_rows_in_common_are_those_of_the_ranges():
    for senders in range(1, 9):
        for receivers in range(1, 9):
            expected = {}
            for i in range(senders):
                for j in range(receivers):
                    common = min((i + 1) / senders, (j + 1) / receivers) - max(i / senders, j / receivers)
                    if common > 1e-9:
                        expected[i, j] = pytest.approx(common)
            assert {(i, j): rows for i, j, rows in common_rows(senders, receivers)} == expected


def test_the_planner_prices_stages_and_hops_as_the_simulator_does():
    random = Random(5)
    for shared in (False, True):
        profile = random_profile(random, 4)
        levels = (Level("in", 2, 4.0, 0.1, 3.0, reduce_latency=0.7), Level("out", 2, 2.0, 0.5, shared=shared))
        cluster = Cluster.uniform(levels)
        plan = dapple(profile, cluster, microbatches=4).plan
        built = schedule("dapple", stages=len(plan.stages), microbatches=4, replicas=plan.replicas)
        costs = plan_costs(built.shape, profile, plan, cluster)
        for s, mine in enumerate(plan.devices):
            devices = [slot[0] for slot in mine]
            each, wait = group_all_reduce(cluster, devices)
            size = sum(x.parameter_bytes for x in profile.layers[plan.stages[s].first : plan.stages[s].last + 1])
            assert each * size + wait == pytest.approx(costs.reduce[s])
        assert group_transfer(cluster, [0], [1]) == (0.25, 0.1)
        assert group_transfer(cluster, [0, 1], [2, 3]) == (0.5 if shared else 0.25, 0.5)  # half the rows a pair


def simulated(outcome_profile, plan, cluster, policy):
    edges = sorted(set(outcome_profile.crossing(plan.cuts)) | {(s, s + 1) for s in range(len(plan.stages) - 1)})
    frame = {"stages": len(plan.stages), "microbatches": plan.microbatches, "replicas": plan.replicas}
    built = schedule("dapple", **frame, edges=edges, policy=policy)
    return simulate(built, profile=outcome_profile, plan=plan, cluster=cluster).makespan


def bert(rows):
    """BERT-48 with a batch of 64 rows: the profile of such a micro-batch, and how many there are."""
    return scaled(published("bert-48-pbs-2", 2), rows), 64 // rows


def both_policies(profile, plan, cluster):
    return {policy: simulated(profile, plan, cluster, policy) for policy in ("pa", "pb")}


@needs_profiles
@pytest.mark.parametrize("rows", [1, 2])
def test_bert_48_on_two_machines_of_eight(rows):
    profile, microbatches = bert(rows)
    found = dapple(profile, read_cluster("dapple-a"), microbatches=microbatches)
    assert found.plan.replicas == (8, 8)
    assert found.plan.devices == tuple(tuple((8 * h + d,) for d in range(8)) for h in range(2))


@needs_profiles
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["dapple-b", "dapple-c"])
def test_bert_48_on_sixteen_machines_is_straight_as_published_or_faster_than_that(name, rows):
    """Under each policy; straight is cut as evenly as can be."""
    (profile, microbatches), cluster = bert(rows), read_cluster(name)
    ours = dapple(profile, cluster, microbatches=microbatches).plan
    straight = balance(profile, cluster, stages=16, microbatches=microbatches).plan
    if ours.replicas != (1,) * 16:
        mine, theirs = both_policies(profile, ours, cluster), both_policies(profile, straight, cluster)
        assert all(mine[policy] <= theirs[policy] for policy in mine)


@needs_profiles
@pytest.mark.parametrize(("name", "replicas"), [("dapple-a", (15, 1)), ("dapple-b", (14, 2))])
def test_vgg_19_is_as_published_or_faster_than_that(name, replicas):
    """Batch 2,048 of 32: the published counts with the cut of least L, each plan under the better of the policies."""
    profile, cluster = published("vgg-19-pbs-32", 32), read_cluster(name)
    found = dapple(profile, cluster, microbatches=64)
    devices = (range(replicas[0]), range(replicas[0], 16))
    cuts = range(1, len(profile.layers))
    theirs = [straight_plan([0, cut, len(profile.layers)], devices, "dapple", 64) for cut in cuts]
    prices = [price(profile, cluster, 64, placed_of(plan)) for plan in theirs]
    best = theirs[prices.index(min(prices))]
    assert found.seconds <= min(prices)
    if found.plan.replicas != replicas:
        fastest = min(both_policies(profile, found.plan, cluster).values())
        assert fastest <= min(both_policies(profile, best, cluster).values())


def test_bad_input():
    profile = random_profile(Random(2), 3)
    cluster = Cluster.uniform((Level("link", 2, 1.0),), Device("d", 1.0))
    with pytest.raises(InputError, match=r"a plan that fits 1e-09 GB a device on 2 device.*GB short; what would fit"):
        dapple(profile, cluster, microbatches=4)
    with pytest.raises(InputError, match="microbatches to be a whole number of at least 1"):
        dapple(profile, cluster, microbatches=0)
    with pytest.raises(InputError, match="keep to be a whole number of at least 1"):
        dapple(profile, cluster, microbatches=1, keep=0)
