"""A Pipeline runs a plan: its cuts, chunks, schedule, and what each stage recomputes and offloads, with the numbers of
plain training. What no plan is, and what cannot be run, gets one message."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import plain
from penstock import Cluster, InputError, Layer, Level, Pipeline, Plan, Profile, StagePlan
from penstock.app.plan.command import as_json
from penstock.app.plan.command import plan as find_plan
from penstock.model.layers import layers_of
from penstock.model.offload import Offload

torch.set_num_threads(1)
PLACEMENTS = {  # of 2 ranks
    "gpipe": (0, 1), "1f1b": (0, 1), "zb-h1": (0, 1), "interleaved": (0, 1, 0, 1), "zb-v": (0, 1, 1, 0),
    "pipedream": (0, 1), "2bw": (0, 1), "pipemare": (0, 1),
}  # fmt: skip


def names_of(case: plain.Case) -> tuple[str, ...]:
    return layers_of(case.fresh(), (case.example,), {}).names


def make(schedule: str, sizes: list[int], recompute=(), offload=(), placement=None, parts: int = 4, **options) -> Plan:
    """Stages of so many layers each, in model order, on one device a rank."""
    placement = placement or PLACEMENTS[schedule]
    ends = [0, *accumulate(sizes)]
    stages = [
        StagePlan(first, last - 1, at in recompute, at in offload) for at, (first, last) in enumerate(pairwise(ends))
    ]
    devices = tuple(((rank,),) for rank in range(max(placement) + 1))
    return Plan(tuple(stages), tuple(placement), devices, schedule, parts, options=tuple(sorted(options.items())))


def trained(case: plain.Case, **how) -> tuple[list[float], Pipeline]:
    pipe = Pipeline(case.fresh(), example=case.example, loss=case.loss, optimizer=plain.adamw, **how)
    return [step.loss for step in pipe.train(case.batches)], pipe


def compare(kind: str, plan: object, parts: int = 4) -> Pipeline:
    """Losses and weights against five plain steps."""
    case = plain.case(kind, rows=12)
    losses, model = plain.trained(case, parts if case.by_parts else 1)
    found, pipe = trained(case, plan=plan)
    assert max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True)) < 1e-12
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-10
    return pipe


@st.composite
def plans(draw, layers: int) -> Plan:
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"]))
    pieces = len(PLACEMENTS[schedule])
    starts = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=pieces - 1, max_size=pieces - 1)))
    sizes = [b - a for a, b in pairwise([0, *starts, layers])]
    flags = st.sets(st.integers(0, pieces - 1))
    return make(schedule, sizes, draw(flags), draw(flags))


@pytest.mark.parametrize("kind", ["gpt", "mlp", "conv"])
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_plan_trains_as_plain_training_does(kind, data):
    names = names_of(plain.case(kind, rows=12))
    plan = data.draw(plans(len(names)))
    pipe = compare(kind, plan)
    assert [pipe.split.cuts[at][0] for at in range(len(plan.stages) - 1)] == [names[at] for at in plan.cuts]
    assert pipe.schedule.shape.placement == plan.placement


def test_each_stage_recomputes_and_offloads_as_it_is_told():
    layers = len(names_of(plain.case("gpt", rows=12)))
    pipe = compare("gpt", make("zb-v", [1, 3, 2, layers - 6], recompute={1, 3}, offload={0, 1}))
    assert [stage.forwards for stage in pipe.stages] == [20, 40, 20, 40]  # 5 steps of 4 micro-batches
    assert [stage.settings.offload for stage in pipe.stages] == [Offload.ACTIVATIONS] * 2 + [Offload.NOTHING] * 2


def test_what_is_asked_of_all_stages_comes_beside_what_the_plan_asks_of_some():
    case = plain.case("mlp", rows=12)
    layers = len(names_of(case))
    plan = make("1f1b", [3, layers - 3], recompute={1}, offload={0})
    found, pipe = trained(case, plan=plan, recompute="except-last", offload="weights", clip=10.0)
    assert [stage.settings.recompute for stage in pipe.stages] == ["except-last", "always"]
    assert [stage.settings.offload for stage in pipe.stages] == [Offload.ALL, Offload.WEIGHTS]
    assert found == trained(case, plan=make("1f1b", [3, layers - 3]), clip=10.0)[0]


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("pipedream", {0}), ("2bw", {0}), ("pipemare", ())],  # the last runs forwards again with newer weights
)
def test_an_asynchronous_plan_is_the_schedule_with_its_cuts(schedule, recompute):
    case = plain.case("mlp", rows=12)
    names = names_of(case)
    plan = make(schedule, [3, len(names) - 3], recompute=recompute, offload={1}, parts=2)
    found, pipe = trained(case, plan=plan, t3=1)
    by_hand, other = trained(case, cuts=[names[3]], schedule=schedule, microbatches=2, t3=1)
    assert found == by_hand
    assert plain.off(plain.weights(pipe.model), plain.weights(other.model)) == 0
    assert [stage.forwards for stage in pipe.stages] == [20 if recompute else 10, 10]


def test_three_chunks_a_rank_and_options_of_the_schedule():
    layers = len(names_of(plain.case("gpt", rows=12)))
    compare("gpt", make("interleaved", [1, 2, 1, 2, 1, layers - 7], placement=(0, 1, 0, 1, 0, 1)))
    compare("gpt", make("dapple", [5, layers - 5], placement=(0, 1), policy="pb"))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_a_plan_with_replicas_trains_as_plain_training_does(schedule):
    """Its slots in another order than its devices, some of which it leaves out."""
    layers = len(names_of(plain.case("gpt", rows=12)))
    sizes = [3, layers - 3] if schedule != "interleaved" else [1, 3, 2, layers - 6]
    plan = replace(make(schedule, sizes, recompute={1}), devices=(((5,), (0,)), ((3,),)))
    pipe = compare("gpt", plan)
    assert pipe.schedule.shape.replicas == (2, 1)
    assert len(pipe.stages) == (3 if schedule != "interleaved" else 6)


@pytest.mark.parametrize("method", ["dapple", "search"])
def test_what_planners_make_with_replicas_trains_as_plain_training_does(method):
    case = plain.case("gpt", rows=12)
    cluster = Cluster.uniform((Level("link", 2, 100.0), Level("network", 2, 50.0)))
    found = find_plan(profile_of(case), cluster, method=method, batch=12)
    assert max(found.plan.replicas) > 1
    assert as_json(found)["trainable"]
    assert compare("gpt", as_json(found)).schedule.shape.replicas == found.plan.replicas


def profile_of(case: plain.Case, seed: int = 0) -> Profile:
    dice = Random(seed)
    return Profile(
        tuple(Layer(name, *(dice.uniform(1, 9) for _ in range(3)), output_bytes=1.0) for name in names_of(case)),
        samples=3,
    )


def prediction():
    case = plain.case("gpt", rows=12)
    return find_plan(profile_of(case), Cluster.uniform((Level("link", 2, 10.0),)), method="balance", batch=12)


def test_what_a_planner_returns_and_the_json_of_it(tmp_path):
    found = prediction()
    assert found.plan.microbatches == 4
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(as_json(found)))
    losses = [
        compare("gpt", plan).schedule.shape
        for plan in (found, as_json(found), found.plan, found.plan.to_json(), file, str(file))
    ]
    assert len(set(losses)) == 1


def test_a_switch_goes_on_with_the_plans_stages():
    case = plain.case("mlp", rows=12)
    layers = len(names_of(case))
    losses, _ = plain.trained(case)
    pipe = Pipeline(
        case.fresh(), example=case.example, loss=case.loss, optimizer=plain.adamw, plan=make("1f1b", [3, layers - 3])
    )
    found = [pipe.step(*batch).loss for batch in case.batches[:2]]
    pipe.switch("gpipe", microbatches=2)
    found += [pipe.step(*batch).loss for batch in case.batches[2:]]
    assert found == pytest.approx(losses, rel=1e-12)


def refusal(plan: object, **how) -> str:
    case = plain.case("mlp", rows=12)
    with pytest.raises(InputError) as caught:
        trained(case, plan=plan, **how)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


@pytest.mark.parametrize(
    "beside",
    [{"stages": 2}, {"cuts": ["8"]}, {"chunks": 1}, {"schedule": "1f1b"}, {"microbatches": 4}],
    ids=lambda beside: next(iter(beside)),
)
def test_a_plan_stands_alone(beside):
    assert refusal(make("1f1b", [8, 8]), **beside) == (
        "expected plan= alone, which says stages, cuts, chunks, replicas, schedule, microbatches, "
        f"but got {next(iter(beside))} too; leave out either"
    )


def test_plans_that_do_not_fit_the_model():
    layers = len(names_of(plain.case("mlp", rows=12)))
    said = refusal(make("1f1b", [2, layers - 1]))
    assert said.startswith(f"expected a plan of the model's {layers} layers, but got one of {layers + 1}; profile")
    other = as_json(prediction())
    assert "layers, but got one of" in refusal(other)
    names = list(names_of(plain.case("mlp", rows=12)))
    turned = {"plan": make("1f1b", [3, layers - 3]).to_json(), "order": [names[1], names[0], *names[2:]]}
    assert f"layer 0 is {names[1]!r} in the plan and {names[0]!r} in the model" in refusal(turned)
    strange = {"plan": make("1f1b", [3, layers - 3]).to_json(), "order": [f"node{at}" for at in range(layers)]}
    compare("mlp", strange)  # a text profile calls them otherwise


def test_a_plan_of_another_model_with_as_many_layers():
    case = plain.case("mlp", rows=12)
    names = list(names_of(case))
    plan = make("1f1b", [3, len(names) - 3]).to_json()
    compare("mlp", {"plan": plan, "order": names})
    compare("mlp", {"plan": plan, "order": [f"node{at} Linear(6, 6)" for at in range(len(names))]})
    said = (
        "expected a plan of the model's own layers, but got layer {} is {!r} in the plan and {!r} in the model; profile"
    )
    other = {"plan": plan, "order": [*names[:4], "strange", *names[5:]]}
    assert refusal(other).startswith(said.format(4, "strange", names[4]))
    assert refusal({"plan": plan, "order": names[:5]}).startswith(said.format(5, None, names[5]))
    layers = tuple(Layer(f"other.{name}", 1.0, 1.0, 1.0) for name in names)
    found = find_plan(Profile(layers), Cluster.uniform((Level("link", 2, 10.0),)), method="balance")
    assert refusal(found).startswith(said.format(0, f"other.{names[0]}", names[0]))


def test_what_cannot_be_run_yet():
    stages = (StagePlan(0, 3), StagePlan(4, 15))
    wide = Plan(stages, (0, 1), (((0, 1),), ((2, 3),)), "1f1b", 4)
    assert "a plan with one device in each tensor group, which is all that can be run so far, but got 2" in refusal(
        wide
    )


def test_plans_that_contradict_themselves():
    wrong = make("zb-v", [4, 4, 4, 4], placement=(0, 1, 0, 1))
    assert "a plan whose stages are on ranks [0, 1, 1, 0], as zb-v has them, but got [0, 1, 0, 1]" in refusal(wrong)
    assert "options that 1f1b has (none), but got policy" in refusal(make("1f1b", [8, 8], policy="pa"))
    assert "the name of a method, but got '1f2b'; try 1f1b" in refusal(make("1f2b", [8, 8], placement=(0, 1)))
    assert "no options of the schedule beside a plan, but got policy" in refusal(make("1f1b", [8, 8]), policy="pa")
    assert "an asynchronous schedule for t1" in refusal(make("1f1b", [8, 8]), t1=3)
    modules = [nn.Linear(6, 6), nn.Linear(6, 6)]
    with pytest.raises(InputError, match="one model for a plan, which cuts it, but got a list of stage modules"):
        Pipeline(modules, example=torch.ones(2, 6), plan=make("1f1b", [1, 1]))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "plan.json: expected a plan as JSON, but got not JSON: Expecting property name"),
        ("{}", "plan.json: expected the key 'stages' in a plan, but got none"),
        ("[" * 100_000, "plan.json: expected a plan as JSON, but got brackets nested too deeply"),
        ("[]", "plan.json: expected one plan, but got a list; plan by one method, not by all"),
        ("3", "plan.json: expected one plan, but got a int"),
        ('{"plan": {"stages": 3}}', "plan.json: expected a plan as to_json writes it, but got"),
        ('{"plan": []}', "plan.json: expected a plan as to_json writes it, but got"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path, content, said):
    file = tmp_path / "plan.json"
    file.write_text(content)
    assert refusal(file).startswith(f"{tmp_path}/{said}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stages": []}, "a plan with at least one stage"),
        ({"devices": [[], [[0]]]}, "each slot to have devices of its own"),
        ({"devices": [[[0]], [[0]]]}, "each slot to have devices of its own"),
        ({"placement": [0, 2]}, "ranks 0 to 1 in the placement"),
        ({"microbatches": "4"}, "microbatches to be a whole number of at least 1"),
        ({"microbatches": 0}, "microbatches to be a whole number of at least 1"),
        ({"schedule": 3}, "schedule= to be a name, or a schedule"),
        ({"stages": [{"first": 0, "last": 15, "recompute": "yes"}]}, "recompute of a stage to be True or False"),
        ({"stages": [{"first": 0, "last": 15, "color": "red"}]}, "arguments that StagePlan takes"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else None,
)
def test_a_plan_with_a_wrong_value(change, said):
    one = {"placement": [0], "devices": [[[0]]]} if "stages" in change else {}
    assert f"expected {said}" in refusal({"plan": make("1f1b", [8, 8]).to_json() | one | change})


def test_what_is_no_plan_at_all(tmp_path):
    assert "plan= to be a Plan, what penstock.plan() returns, or the path of its JSON, but got 3" in refusal(3)
    assert "expected a readable plan, but got No such file" in refusal(tmp_path / "none.json")
    assert "expected a readable plan, but got Is a directory" in refusal(tmp_path)
