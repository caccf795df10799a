"""`penstock plan` from files to text and JSON: what is printed is what is simulated, and bad input gets one message."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from random import Random

import pytest

from commands import penstock
from penstock import Cluster, Device, FormatError, InputError, Layer, Level, Profile, schedule, simulate
from penstock.app.plan.command import as_json, as_text, plan, plan_all, plan_command, read_profile
from penstock.app.plan.explain import Traffic, delay, runner_up, traffic
from penstock.app.plan.predict import predict
from penstock.core.plan import Plan, StagePlan
from penstock.planners.outcome import PlanOutcome
from penstock.planners.registry import PLANNERS
from planners.brute import random_profile

TOML = """
hosts = 2
devices = 2
[kinds.d]
memory = 1e4
[inside]
bandwidth = 8.0
[between]
bandwidth = 4.0
"""


@pytest.fixture
def files(tmp_path):
    profile = random_profile(Random(8), 6)
    (tmp_path / "p.json").write_text(json.dumps(profile.to_json()))
    (tmp_path / "c.toml").write_text(TOML)
    return tmp_path / "p.json", tmp_path / "c.toml"


@pytest.mark.parametrize("method", PLANNERS)
def test_json_of_every_method(files, method):
    told = json.loads(plan_command(*files, method, batch=16, json_wanted=True))
    assert [stage["layers"][0] for stage in told["stages"][1:]] == [
        stage["layers"][1] + 1 for stage in told["stages"][:-1]
    ]
    assert (told["stages"][0]["layers"][0], told["stages"][-1]["layers"][1]) == (0, 5)
    used = sorted({device for stage in told["stages"] for device in stage["devices"]})
    assert all(len(stage["devices"]) == stage["replicas"] for stage in told["stages"])
    assert used == [entry["device"] for entry in told["memory"]]
    assert all(entry["limit"] == 1e4 and entry["bytes"] <= 1e4 for entry in told["memory"])
    assert told["fits"]
    assert told["throughput"] == pytest.approx(told["rows"] / told["step_seconds"])
    assert Plan.from_json(told["plan"]).to_json() == told["plan"]
    assert told["bottleneck"][0]["share"] <= 1 + 1e-9


def test_a_synchronous_step_is_the_simulated_one(files):
    profile = read_profile(files[0])
    cluster = Cluster.uniform((Level("link", 3, 8.0),))
    found = plan(profile, cluster, method="balance", batch=12)
    built = schedule("1f1b", stages=3, microbatches=12)
    assert found.step_seconds == simulate(built, profile=profile, plan=found.plan, cluster=cluster).makespan


def test_an_asynchronous_step_is_the_steady_pace():
    layers = tuple(Layer(f"L{at}", 1.0, 1.0, 1.0, kept_bytes=5, parameter_bytes=1) for at in range(4))
    found = plan(Profile(layers), Cluster.uniform((Level("link", 4, 1e9),)), method="pipedream")
    assert found.step_seconds == pytest.approx(3.0, rel=1e-6) == found.outcome.seconds
    assert found.busy[0] == (pytest.approx(1.0), found.busy[0][1])


def test_the_pace_of_an_asynchronous_plan_leaves_its_filling_out():
    layers = tuple(Layer(f"L{at}", 1.0, 1.0, 1.0) for at in range(4))
    found = plan(Profile(layers), Cluster.uniform((Level("link", 4, 1e9),)), method="balance", schedule="pipedream")
    assert (found.plan.ranks, found.step_seconds) == (4, pytest.approx(3.0 * found.plan.microbatches))


def test_what_moves_in_a_step_is_that_of_all_its_micro_batches():
    layers = tuple(Layer(f"L{at}", 1.0, 1.0, 1.0, output_bytes=5.0) for at in range(2))
    found = plan(Profile(layers), Cluster.uniform((Level("link", 2, 8.0),)), method="balance", batch=6)
    assert traffic(found) == [Traffic("stage 0 to 1, and as much back", 30.0, "link", 30 / 8)]


def test_plans_of_other_batches_are_compared_by_the_row():
    profile, cluster = Profile((Layer("L", 1.0, 1.0, 1.0),)), Cluster.uniform((Level("link", 1, 8.0),))
    one, four = (plan(profile, cluster, method="balance", batch=rows) for rows in (1, 4))
    loss = runner_up(four, one, "small")
    assert (loss.step_seconds, loss.more) == (pytest.approx(12.0), pytest.approx(0.0))
    assert [share for _, share in loss.causes] == pytest.approx([0.0, 0.0])


def test_text_names_stages_memory_and_bottleneck(files):
    said = plan_command(*files, "dapple", batch=8)
    for words in ("dapple: ", "stage 0: layers 0 to ", "rows/s, bubble", "busiest, as a share of the step", "1e-05 GB"):
        assert words in said
    every = plan_command(*files, "all", batch=8)
    assert all(f"{name}: " in every for name in PLANNERS)
    assert [one["method"] for one in json.loads(plan_command(*files, "all", batch=8, json_wanted=True))] == list(
        PLANNERS
    )


def test_an_asynchronous_plan_says_what_it_may_cost(files):
    """By the schedule's own weight versions: of p stages with one micro-batch, the first is p - 1 updates late."""
    layers = tuple(Layer(f"L{at}", 1.0, 1.0, 1.0) for at in range(4))
    profile, cluster = Profile(layers), Cluster.uniform((Level("link", 4, 1e9),))
    late = {"pipedream": (1, 3), "pipemare": (1, 3), "2bw": (4, 1), "1f1b": (4, 0), "gpipe": (1, 0)}
    for name, (microbatches, updates) in late.items():
        found = plan(profile, cluster, method="balance", schedule=name, batch=microbatches)
        told, said = as_json(found), as_text(found)
        assert found.plan.ranks == 4
        assert (told["asynchronous"], told["delay"]) == (updates > 0, updates)
        assert ("asynchronous: " in said) == (updates > 0)
        assert (f"up to {updates} update{'s' if updates > 1 else ''} old" in said) == (updates > 0)


def test_the_command_plans_asynchronously_when_it_is_asked_to(files):
    """Two stages of unlike work: without a flush the pace is that of the busier one alone."""
    asked = (
        "plan",
        "--profile",
        files[0],
        "--cluster",
        files[1],
        "--batch",
        4,
        "--microbatch",
        1,
        "--replicas",
        1,
        "--json",
    )
    usual, allowed = (json.loads(penstock(*asked, *more).stdout) for more in ((), ("--allow-async",)))
    assert not usual["asynchronous"]
    assert {one["schedule"] for one in usual["runners_up"]}.isdisjoint({"2bw", "pipedream", "pipemare"})
    assert allowed["asynchronous"]
    assert allowed["step_seconds"] < usual["step_seconds"]


def test_replicas_that_take_turns_update_together():
    """Two stages of two replicas each, in turns: a stage's version is of two mini-batches."""
    layers = tuple(Layer(f"L{at}", 1.0, 1.0, 1.0) for at in range(2))
    cluster = Cluster.uniform((Level("link", 4, 1e9),))
    stages, slots = (StagePlan(0, 0), StagePlan(1, 1)), (((0,), (1,)), ((2,), (3,)))
    made = Plan(stages, (0, 1), slots, "pipedream", 1)
    assert delay(predict(PlanOutcome("given", made, Profile(layers), 0.0), cluster)) == 1


def test_methods_whose_plans_are_asynchronous_are_compared_when_asked_for(files):
    told = {one["method"]: one for one in json.loads(plan_command(*files, "all", batch=8, json_wanted=True))}
    assert not any(one.get("asynchronous") for one in told.values())
    for name in ("pipedream", "2bw"):
        assert told[name]["refused"].endswith(f"add --allow-async (allow_async=True), or ask for {name} by name")
    said = plan_command(*files, "all", batch=8)
    assert "asynchronous: " not in said
    assert "pipedream: expected allow_async for a method whose plans are asynchronous, but got none" in said
    more = json.loads(plan_command(*files, "all", batch=8, json_wanted=True, allow_async=True))
    assert {one["method"] for one in more if one.get("asynchronous")} >= {"pipedream", "2bw"}
    assert json.loads(plan_command(*files, "pipedream", json_wanted=True))["asynchronous"], "asked for by name"


def test_options_go_to_the_methods_that_have_them_when_all_are_compared(files):
    ask = {"batch": 8, "schedules": "zb-h1", "seconds": 30.0, "seed": 3, "replicas": 1, "stages": 2}
    told = {one["method"]: one for one in json.loads(plan_command(*files, "all", **ask, json_wanted=True))}
    assert list(told) == list(PLANNERS)
    assert told["search"]["schedule"] == "zb-h1"
    assert [len(told[name]["stages"]) for name in ("balance", "gpipe")] == [2, 2]
    assert {stage["replicas"] for stage in told["search"]["stages"]} == {1}
    said = plan_command(*files, "all", batch=8, schedules="1f2b")
    assert "search: expected schedules that search knows, but got '1f2b'" in said
    with pytest.raises(InputError, match=r"options that some method has .*, but got colour, hue; leave the others out"):
        plan_all(read_profile(files[0]), Cluster.uniform((Level("link", 2, 8.0),)), hue=1, colour=2, seed=3)


def test_what_does_not_fit_is_said(files):
    profile = read_profile(files[0])
    small = Cluster.uniform((Level("link", 2, 8.0),), Device("d", 100.0))
    found = plan(profile, small, method="balance")
    assert found.over
    assert not as_json(found)["fits"]
    tiny = Cluster.uniform((Level("link", 2, 8.0),), Device("d", 1.0))
    refused = plan_all(profile, tiny, allow_async=True)
    assert [isinstance(one, InputError) for one in refused] == [True, False, False, True, True, True]


@pytest.mark.parametrize("method", ["search", "pipedream", "dapple", "2bw"])
def test_what_a_planner_thinks_fits_does_so_in_the_simulator(method):
    """Buffers of the model are there once, whatever versions of the weights there are."""
    random, planned = Random(f"fits {method}"), 0
    for _ in range(40):
        drawn = random_profile(random, random.randint(1, 5))
        layers = [replace(layer, buffer_bytes=random.choice((0, 40))) for layer in drawn.layers]
        needed = sum(2 * x.parameter_bytes + x.buffer_bytes + x.optimizer_bytes + x.kept_bytes for x in layers)
        device = Device("d", max(1.0, needed * random.choice((0.5, 0.8, 1.0, 1.2, 1.5))))
        cluster = Cluster.uniform((Level("link", random.randint(1, 3), 10.0),), device)
        try:
            found = plan(Profile(tuple(layers), samples=4), cluster, method=method, batch=16)
        except InputError:
            continue
        assert not found.over
        planned += 1
    assert planned > 10


def test_a_micro_batch_of_another_size(files):
    profile, cluster = read_profile(files[0]), Cluster.uniform((Level("link", 2, 8.0),))
    found = plan(profile, cluster, method="balance", batch=12, microbatch=3)
    assert (found.plan.microbatches, found.rows, found.outcome.profile.samples) == (4, 12, 3)


def test_replicas_that_take_turns_reduce_once_a_round():
    """What moves is told for one step, as the busiest parts of a step are."""
    profile = Profile((Layer("L", 2.0, 2.0, 2.0, parameter_bytes=32.0),))
    found = plan(profile, Cluster.uniform((Level("link", 4, 64.0),)), method="pipedream", batch=1)
    (moved,) = traffic(found)
    assert found.plan.replicas == (4,)
    assert moved.bytes == 2 * 3 / 4 * 32 / 4
    share = next(share for share, what in found.busy if what == "the all-reduce of stage 0")
    assert moved.seconds == pytest.approx(share * found.step_seconds)


def test_replicas_with_less_than_a_row_are_told_and_not_compared(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(Profile((Layer("L", 2.0, 2.0, 2.0, parameter_bytes=1.0),)).to_json()))
    (tmp_path / "c.toml").write_text("devices = 4\n[inside]\nbandwidth = 64.0\n")
    files = tmp_path / "p.json", tmp_path / "c.toml"
    why = "cannot be run: 4 replicas share micro-batches of 1 row(s), less than a row each"
    assert why in plan_command(*files, "dapple", batch=8)
    assert why not in plan_command(*files, "dapple", batch=8, microbatch=4)
    assert why not in plan_command(*files, "pipedream", batch=1)  # its replicas take turns
    told = {
        one["method"]: one
        for one in json.loads(plan_command(*files, "all", batch=8, json_wanted=True, allow_async=True))
    }
    assert {name for name, one in told.items() if not one["whole_rows"]} == {"dapple"}
    table = plan_command(*files, "all", batch=8, allow_async=True).partition("fastest first")[2]
    assert "dapple" not in table
    assert "pipedream" in table


def test_what_is_a_little_faster_is_named(tmp_path):
    layers = tuple(Layer(f"L{at}", 2.0, 2.0, 2.0, parameter_bytes=1.0) for at in range(2))
    (tmp_path / "p.json").write_text(json.dumps(Profile(layers, samples=1).to_json()))
    (tmp_path / "c.toml").write_text("devices = 2\n[inside]\nbandwidth = 64.0\n")
    files = tmp_path / "p.json", tmp_path / "c.toml"
    said = plan_command(*files, batch=1000, microbatch=1, allow_async=True)
    assert "schedule 1f1b" in said
    assert "none is more than 0.1% faster" in said
    assert re.search(r"faster, but by less than 1%: .*2bw 0\.10%.*; for so little a synchronous schedule", said)
    assert re.search(r"runners-up take: .*2bw \(1:1\) -0\.1%", said)
    alone = plan_command(*files, batch=1000, microbatch=1, schedules="1f1b")
    assert "none is faster" in alone
    assert "by less than" not in alone


def test_large_runners_up_are_not_simulated_once_more(monkeypatch):
    """Their seconds are known, and their causes would not be told."""
    profile = Profile(tuple(Layer(f"L{at}", 2.0, 2.0, 2.0, parameter_bytes=1.0) for at in range(2)))
    cluster = Cluster.uniform((Level("link", 2, 64.0),))
    found = plan(profile, cluster, batch=4096, microbatch=1)
    others = {runner.method: runner.seconds for runner in found.outcome.runners if runner.plan != found.plan}
    monkeypatch.setattr("penstock.app.plan.explain.predict", lambda *given: pytest.fail("simulated"))
    told = as_json(found)["runners_up"]
    assert len(told) > 1
    for one in told:
        assert one["step_seconds"] == others[one["schedule"]]
        assert one["more"] == pytest.approx(one["step_seconds"] / found.step_seconds - 1)


def test_plans_with_replicas_are_trained(tmp_path):
    """Two layers of the same work, hardly anything to reduce: replicas have no bubble."""
    layers = tuple(Layer(f"L{at}", 2.0, 2.0, 2.0, parameter_bytes=1.0) for at in range(2))
    (tmp_path / "p.json").write_text(json.dumps(Profile(layers, samples=2).to_json()))
    (tmp_path / "c.toml").write_text("devices = 2\n[inside]\nbandwidth = 64.0\n")
    files = tmp_path / "p.json", tmp_path / "c.toml"
    assert "cannot be trained yet" not in plan_command(*files, schedules="1f1b")
    told = json.loads(plan_command(*files, schedules="1f1b", json_wanted=True))
    assert told["trainable"]
    assert [stage["replicas"] for stage in told["stages"]] == [2]
    assert "cannot be trained yet" not in plan_command(*files, "pipedream")
    assert json.loads(plan_command(*files, "pipedream", json_wanted=True))["trainable"]
    told = json.loads(plan_command(*files, replicas=1, json_wanted=True))
    assert told["trainable"]
    assert [stage["replicas"] for stage in told["stages"]] == [1, 1]


@pytest.mark.parametrize("method", PLANNERS)
def test_layers_that_take_no_time_are_nothing_to_plan(method):
    with pytest.raises(InputError, match="a profile in which some layer takes time, but got 0 seconds in all"):
        plan(Profile((Layer("a", 0.0, 0.0, 0.0),) * 2), Cluster.uniform((Level("link", 2, 8.0),)), method=method)


def test_bad_input(files, tmp_path):
    profile, cluster = files
    with pytest.raises(InputError, match="the name of a planner, but got 'daple'; try dapple; all are search,"):
        plan_command(profile, cluster, "daple")
    with pytest.raises(InputError, match="a multiple of the micro-batch of 3 rows, but got 10"):
        plan_command(profile, cluster, batch=10, microbatch=3)
    with pytest.raises(InputError, match=r"options that 2bw has \(none\), but got keep"):
        plan(read_profile(profile), Cluster.uniform((Level("link", 2, 8.0),)), method="2bw", keep=1)
    with pytest.raises(FormatError, match=r"none\.json: expected a readable profile"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(InputError, match="samples with a text profile alone; JSON contains the number, but got 3"):
        read_profile(tmp_path / "none.json", 3)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(FormatError, match=r"bad\.json: expected a profile as JSON, but got not JSON"):
        read_profile(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(FormatError, match=r"bad\.json: expected the key 'layers'"):
        read_profile(tmp_path / "bad.json")
