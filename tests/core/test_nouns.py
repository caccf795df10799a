"""Cluster, Profile, Plan, Shape, Timeline: JSON both ways, and refusals that say what is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import (
    Cluster,
    Device,
    FormatError,
    InputError,
    Layer,
    Level,
    Plan,
    Profile,
    Schedule,
    StagePlan,
    Timeline,
    schedule,
    simulate,
)
from penstock.core.shape import Law, Shape, Sharing

LEVELS = (Level("host", 2, 10.0, 0.5), Level("network", 3, 1.0, 2.0, reduce_bandwidth=4.0, shared=True))


def through_json(noun):
    return type(noun).from_json(json.loads(json.dumps(noun.to_json())))


def test_cluster_json_and_levels():
    cluster = Cluster(tuple(Device("a", 8.0, 1.0 + i) for i in range(6)), LEVELS)
    assert through_json(cluster) == cluster
    assert [cluster.meeting_level(0, other) for other in range(1, 6)] == [0, 1, 1, 1, 1]
    assert cluster.group(5, 1) == 2


def test_a_cluster_without_limits_is_plain_json():
    cluster = Cluster.uniform((Level("host", 2, float("inf")),))
    assert json.loads(json.dumps(cluster.to_json(), allow_nan=False))["devices"][0]["memory"] is None
    assert through_json(cluster) == cluster


@pytest.mark.parametrize("rate", [None, 5.0, float("inf")])
def test_an_all_reduce_without_limit_is_not_one_as_fast_as_a_transfer(rate):
    cluster = Cluster.uniform((Level("host", 2, 10.0, reduce_bandwidth=rate),))
    written = json.loads(json.dumps(cluster.to_json(), allow_nan=False))
    assert written["levels"][0]["reduce_bandwidth"] == ("inf" if rate == float("inf") else rate)
    assert Cluster.from_json(written) == cluster


@pytest.mark.parametrize(
    ("part", "key", "value", "said"),
    [
        ("levels", "size", 1.0, "size of level 'host' to be a whole number of at least 1, but got 1.0"),
        ("levels", "size", True, "size of level 'host' to be a whole number of at least 1, but got True"),
        ("levels", "name", None, "the name of a level to be a text, but got None"),
        ("levels", "shared", 1, "shared of level 'host' to be True or False, but got 1"),
        ("levels", "reduce_bandwidth", "fast", "reduce_bandwidth of level 'host' to be a number, but got 'fast'"),
        ("levels", "latency", None, "latency of level 'host' to be a number, but got None"),
        ("levels", "size", 10**9, "at most 1000000 devices in all, but got 1000000000"),
        ("devices", "speed", True, "speed of device 'a' to be a number, but got True"),
        ("devices", "kind", 3, "the kind of a device to be a text, but got 3"),
        ("devices", "memory", 10**400, r"memory of device 'a' to be at most 1e\+30, but got about 1e400"),
    ],
    ids=lambda part: str(part)[:30],
)
def test_values_of_a_written_cluster(part, key, value, said):
    written = Cluster((Device("a", 8.0),), (Level("host", 1, 10.0, 0.5),)).to_json()
    written[part][0][key] = value
    with pytest.raises(InputError, match=f"^expected {said}; "):
        Cluster.from_json(written)


def test_a_cluster_from_before_offload_and_reduce_latency_still_loads():
    written = Cluster((Device("a", 8.0),), (Level("host", 1, 10.0, 0.5),)).to_json()
    for noun in (*written["devices"], *written["levels"]):
        noun.pop("host_bandwidth", None), noun.pop("reduce_latency", None)
    found = Cluster.from_json(written)
    assert (found.devices[0].host_bandwidth, found.levels[0].reduce_wait) == (0.0, 0.5)


@given(
    st.lists(st.tuples(*[st.floats(0, 1e3)] * 3), min_size=1, max_size=8),
    st.data(),
)
def test_profile_json_with_branches(costs, data):
    layers = tuple(Layer(f"layer {i}", *cost, output_bytes=float(i)) for i, cost in enumerate(costs))
    pairs = [(a, b) for a in range(len(layers)) for b in range(a + 1, len(layers))]
    edges = tuple(data.draw(st.lists(st.sampled_from(pairs), unique=True))) if pairs else ()
    profile = Profile(layers, edges, samples=4, device="cpu")
    assert through_json(profile) == profile


def test_a_profiles_branches_cross_a_cut_once_for_each_stage_that_needs_them():
    # 0 feeds 1 and, over the skip, 3; 1 feeds 2 feeds 3. Stages: {0}, {1, 2}, {3}.
    layers = tuple(Layer(str(i), 1, 1, 1, output_bytes=10.0**i) for i in range(4))
    profile = Profile(layers, ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3)))
    assert profile.crossing((1, 3)) == {(0, 1): 1.0, (0, 2): 1.0, (1, 2): 100.0}


def test_plan_json_and_views():
    plan = Plan(
        (StagePlan(0, 1), StagePlan(2, 2, recompute=True), StagePlan(3, 5)),
        (0, 1, 2),
        (((0,), (1,)), ((2,),), ((3, 4),)),
        "1f1b",
        8,
        options=(("cap", 3),),
    )
    assert through_json(plan) == plan
    assert (plan.replicas, plan.cuts, plan.ranks, plan.chunks) == ((2, 1, 1), (2, 3), 3, 1)
    assert plan.slots == ((0,), (1,), (2,), (3, 4))


def test_shape_json_and_slots():
    shape = Shape("x", Law.STASH, (0, 1, 2), 2, 5, (2, 1, 3), Sharing.TURNS, ((0, 1), (1, 2), (0, 2)))
    assert through_json(shape) == shape
    assert shape.slot_rank.tolist() == [0, 0, 1, 2, 2, 2]
    assert shape.slot_replica.tolist() == [0, 1, 0, 0, 1, 2]
    assert [shape.slot(s, r) for s, r in ((0, 1), (1, 0), (2, 2))] == [1, 2, 5]
    assert shape.stage_updates.tolist() == [3, 5, 2]


def test_timeline_json_keeps_times_and_memory():
    line = simulate(schedule("zb-v", stages=2, microbatches=4), transfer=0.5)
    back = through_json(line)
    assert isinstance(back, Timeline)
    assert np.array_equal(back.start, line.start)
    assert np.array_equal(back.end, line.end)
    assert back.figures() == line.figures()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Level("host", 0, 1.0), "'host' to join at least 1 group, but got 0"),
        (lambda: Level("host", 1, 0.0), "positive bandwidths at level 'host'"),
        (lambda: Level("host", 1, float("nan")), "positive bandwidths"),
        (lambda: Level("host", 1, 1.0, -1.0), "latency of 0 or more seconds"),
        (
            lambda: Level("host", 1, 1.0, reduce_latency=-1.0),
            "latency of 0 or more seconds at level 'host'",
        ),
        (lambda: Device(host_bandwidth=-1.0), "host_bandwidth of 0 or more bytes/s of device 'device', but got -1.0"),
        (lambda: Device(host_bandwidth=float("inf")), "host_bandwidth of 0 or more bytes/s"),
        (lambda: Device(speed=0), "positive memory and speed of device 'device'"),
        (lambda: Device(memory=-1), "positive memory and speed"),
        (lambda: Device("slow", speed=1e-300), "speed of device 'slow' to be at least 1e-09, but got 1e-300"),
        (
            lambda: Device(host_bandwidth=1e31),
            r"host_bandwidth of device 'device' to be at most 1e\+30, but got 1e\+31",
        ),
        (lambda: Level("host", 1, 1e-300), "bandwidth of level 'host' to be at least 1e-09, but got 1e-300"),
        (lambda: Level("host", 1, 1.0, 1e300), r"latency of level 'host' to be at most 1e\+30, but got 1e\+300"),
        (lambda: Cluster.uniform((Level("host", 10**9, 1.0),)), "at most 1000000 devices in all, but got 1000000000"),
        (lambda: Cluster((Device(),), LEVELS), "6 devices, the product of the level sizes, but got 1"),
        (lambda: Layer("conv", -1.0, 0, 0), "forward of layer 'conv' to be a number of 0 or more, but got -1.0"),
        (lambda: Layer("conv", 0, 0, 0, parameter_bytes=float("nan")), "parameter_bytes of layer 'conv'"),
        (lambda: Profile(()), "at least one layer"),
        (lambda: Profile((Layer("a", 1, 1, 1), Layer("b", 1, 1, 1)), ((1, 0),)), r"no cycles\), but got \(1, 0\)"),
        (lambda: Plan((StagePlan(0, 1), StagePlan(3, 4)), (0, 1), (((0,),), ((1,),)), "1f1b", 1), "begins at layer 2"),
        (lambda: Plan((StagePlan(0, 1),), (0,), (((0,), (0,)),), "1f1b", 1), "devices of its own"),
        (lambda: Plan((StagePlan(0, 1),), (1,), (((0,),),), "1f1b", 1), "ranks 0 to 0 in the placement"),
        (lambda: Shape("x", Law.SYNC, (0, 2), 1), "uses every rank from 0 up"),
        (lambda: Shape("x", Law.SYNC, (0, 1), 0), "microbatches to be a whole number of at least 1, but got 0"),
        (lambda: Shape("x", Law.SYNC, (0, 1), 1, replicas=(1,)), "positive replica count for each of 2 ranks"),
        (lambda: Shape("x", Law.SYNC, (0, 1), 1, replicas=(1, 0)), "positive replica count for each of 2 ranks"),
        (lambda: Shape("x", Law.SYNC, (0, 1), 1, edges=((1, 0),)), "edges from an earlier to a later of 2 stages"),
        (lambda: Shape("x", Law.SYNC, (0,), 1, sharing=Sharing.TURNS), "split each micro-batch under the law 'sync'"),
    ],
)
def test_refusals_name_the_value_and_the_rule(make, said):
    with pytest.raises(InputError, match=said):
        make()


@pytest.mark.parametrize("noun", [Cluster, Plan, Profile, Schedule, Shape, Timeline])
@pytest.mark.parametrize(
    "data", [{}, [], None, {"devices": 3, "layers": 3, "stages": 3, "slots": 3, "timeline": 3, "name": 3}]
)
def test_json_of_another_form_gets_one_message(noun, data):
    with pytest.raises(FormatError, match=r"^JSON: expected .*; (write it with to_json|correct the data)$"):
        noun.from_json(data)


def test_json_with_an_unknown_law_names_it():
    data = schedule("1f1b", stages=2, microbatches=2).to_json()
    data["schedule"]["law"] = "bogus"
    with pytest.raises(FormatError, match="bogus"):
        Schedule.from_json(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stages": [{"first": 0, "last": 1.5}, {"first": 2.5, "last": 3}]}, "last layer of a stage .* but got 1.5"),
        ({"stages": [{"first": 0.0, "last": 3}]}, "first layer of a stage .* but got 0.0"),
        ({"placement": [0.0, 1.0]}, "rank of a stage .* but got 0.0"),
        ({"devices": [[["a"]], [[1]]]}, "number of a device .* but got 'a'"),
        ({"devices": [[[-5]], [[1]]]}, "number of a device .* but got -5"),
        ({"batches": 0}, "batches to be a whole number of at least 1, but got 0"),
    ],
)
def test_numbers_of_a_written_plan(change, said):
    plan = Plan((StagePlan(0, 1), StagePlan(2, 3)), (0, 1), (((0,),), ((1,),)), "1f1b", 2)
    with pytest.raises(InputError, match=said):
        Plan.from_json(plan.to_json() | change)
