"""What measured profiles say beyond seconds and bytes of layers, and what plans cost by them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Cluster, InputError, Layer, Level, Plan, Profile, StagePlan, breakdown, schedule, simulate
from penstock.core.profile import PerStage, Sent

LAYERS = tuple(
    Layer(str(at), 1.0, 2.0, 3.0, output_bytes=8.0, kept_bytes=10.0, update=0.5, full_backward=4.0, spread=0.1)
    for at in range(4)
)
MEASURED = Profile(
    LAYERS,
    ((0, 1), (0, 3), (1, 2), (2, 3)),
    samples=2,
    sent=(Sent(0, (1,), 3.0), Sent(0, (3,), 5.0), Sent(1, (2,), 8.0), Sent(2, (3,), 8.0)),
    per_stage=PerStage(0.25, 0.125, 0.0625),
    repetitions=7,
    disturbed=1,
    busy=2,
    newest=0.25,
)


def test_json_of_all_there_is_and_of_older_files():
    written = json.loads(json.dumps(MEASURED.to_json()))
    assert Profile.from_json(written) == MEASURED
    for key in ("sent", "per_stage", "repetitions", "disturbed", "busy", "newest"):
        del written[key]
    for layer in written["layers"]:
        for key in ("update", "full_backward", "spread"):
            del layer[key]
    old = Profile.from_json(written)
    assert old == Profile(
        tuple(replace(x, update=0.0, full_backward=0.0, spread=0.0) for x in LAYERS), MEASURED.edges, 2
    )
    assert old.layers[0].backward == 5.0
    assert MEASURED.layers[0].backward == 4.0


def test_tensors_that_go_different_ways_cross_for_themselves():
    assert MEASURED.crossing((1, 3)) == {(0, 1): 3.0, (0, 2): 5.0, (1, 2): 8.0}
    assert MEASURED.crossing((2,)) == {(0, 1): 13.0}
    assert MEASURED.leaving((2,)) == [13.0, 0.0]
    assert replace(MEASURED, sent=()).crossing((1, 3)) == {(0, 1): 8.0, (0, 2): 8.0, (1, 2): 8.0}


@given(st.data(), st.integers(2, 7))
def test_outputs_said_twice_cross_the_same(data, count):
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    edges = tuple(sorted(data.draw(st.sets(st.sampled_from(pairs), min_size=1))))
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, count - 1)))))
    plain = Profile(tuple(Layer(str(at), 1, 1, 1, output_bytes=2.0**at) for at in range(count)), edges)
    assert replace(plain, sent=plain.outputs).crossing(cuts) == plain.crossing(cuts)


def test_a_tensor_for_an_earlier_layer_is_refused():
    with pytest.raises(InputError, match=r"no cycles\), but got \(2, 1\)"):
        replace(MEASURED, sent=(Sent(2, (1,), 1.0),))


def predicted(profile, *bounds, method, m):
    stages = tuple(StagePlan(a, b - 1) for a, b in pairwise(bounds))
    plan = Plan(stages, tuple(range(len(stages))), tuple(((at,),) for at in range(len(stages))), method, m)
    cluster = Cluster.uniform((Level("link", max(len(stages), 2), 1e12),))
    built = schedule(method, stages=len(stages), microbatches=m)
    return simulate(built, profile=profile, plan=plan, cluster=cluster)


def test_a_step_costs_full_backwards_what_a_stage_takes_for_itself_and_the_update():
    line = predicted(MEASURED, 0, 4, method="1f1b", m=3)
    assert line.makespan == pytest.approx(3 * (4 * 1.0 + 0.25 + 4 * 4.0 + 0.125) + 4 * 0.5 + 0.0625)
    parts = breakdown(schedule("1f1b", stages=1, microbatches=3), line.costs)
    assert sum(vars(parts).values()) == pytest.approx(line.makespan)


def test_gradients_apart_cost_what_they_cost_apart():
    chain = replace(MEASURED, sent=(), edges=((0, 1), (1, 2), (2, 3)))
    line = predicted(chain, 0, 2, 4, method="zb-h1", m=4)
    work = 4 * (2 * 1.0 + 0.25 + 2 * (2.0 + 3.0) + 0.125) + 2 * 0.5 + 0.0625
    assert line.work == pytest.approx(np.array([work, work]), rel=1e-9)
    assert line.costs.footprint.activations.tolist() == [20.0, 20.0]
    assert predicted(MEASURED, 0, 2, 4, method="gpipe", m=1).costs.footprint.activations.tolist() == [33.0, 20.0]


BAD = [
    ({"samples": 0}, "samples to be a whole number"),
    ({"samples": -4}, "samples to be"),
    ({"samples": 4.5}, "samples to be"),
    ({"samples": None}, "samples to be"),
    ({"edges": [[0.5, 1]]}, "the layer of an edge to be a whole number"),
    ({"sent": [[0, [1], -5]]}, "bytes of a tensor that layer 0 sends to be a number of 0 or more"),
    ({"sent": [[0, [1], "x"]]}, "bytes of a tensor that layer 0 sends"),
    ({"sent": [[9, [], 5]]}, "the layer that sends a tensor to be at most 3"),
    ({"per_stage": {"forward": -1}}, "forward of per_stage"),
    ({"per_stage": {"update": float("nan")}}, "update of per_stage"),
    ({"per_stage": {"backward": "x"}}, "backward of per_stage"),
    ({"per_stage": {"backward": 1e308}}, r"backward of per_stage to be at most 1e\+30, but got 1e\+308"),
    ({"samples": 10**400}, "samples to be at most 1000000000000, but got about 1e400"),
    ({"sent": [[0, [1], 10**400]]}, r"bytes of a tensor that layer 0 sends to be at most 1e\+30, but got about 1e400"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_numbers_of_a_file_that_cannot_be(change, message):
    with pytest.raises(InputError, match=message):
        Profile.from_json(MEASURED.to_json() | change)


@pytest.mark.parametrize(
    ("key", "value"),
    [("forward", None), ("update", "x"), ("kept_bytes", True), ("name", 5), ("forward", -(10**400)), ("update", 1e31)],
    ids=lambda part: str(part)[:30],
)
def test_figures_of_a_layer_that_cannot_be(key, value):
    written = MEASURED.to_json()
    written["layers"][1][key] = value
    with pytest.raises(InputError, match=f"{key} of .*layer"):
        Profile.from_json(written)


@pytest.mark.parametrize(
    ("method", "options", "slower"),
    [("1f1b", {}, 1.0), ("pipedream", {}, 1.0), ("2bw", {}, 1.0), ("pipedream", {"stash": False}, 1.25),
     ("pipemare", {}, 1.25)],
)  # fmt: skip
def test_backwards_on_newer_weights_take_longer_and_others_do_not(method, options, slower):
    plan = Plan((StagePlan(0, 3),), (0,), (((0,),),), method, 2)
    built = schedule(method, stages=1, microbatches=2, batches=3 if method != "1f1b" else None, **options)
    cluster = Cluster.uniform((Level("link", 1, 1e12),))
    line, plain = (
        simulate(built, profile=profile, plan=plan, cluster=cluster)
        for profile in (MEASURED, replace(MEASURED, newest=0))
    )
    assert line.makespan == pytest.approx(slower * plain.makespan)
