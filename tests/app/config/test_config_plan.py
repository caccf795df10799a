"""A config that names a plan's file: it trains by that plan, and whatever would say the same thing again is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock import FormatError, InputError, Plan, StagePlan
from penstock.app.compare.command import CompareOptions, compare
from penstock.app.config.file import read_config
from penstock.app.run.request import Request
from penstock.app.run.train import run, train

torch.set_num_threads(1)
TEXT = """
[model]
factory = "configs_of_plans:model"
[data]
factory = "configs_of_plans:batches"
[pipeline]
{pipeline}
[optimizer]
name = "SGD"
lr = 0.1
[training]
steps = 3
batch = 8
loss = "mse"
plain_steps = 0
"""
CODE = """
import torch
from torch import nn
def model():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
def batches():
    torch.manual_seed(1)
    while True:
        yield torch.randn(8, 4), torch.randn(8, 4)
"""


def made(first: int = 2, schedule: str = "1f1b", parts: int = 2, replicas: int = 1) -> Plan:
    devices = (tuple((at,) for at in range(replicas)), ((9,),))
    return Plan((StagePlan(0, first - 1, recompute=True), StagePlan(first, 5)), (0, 1), devices, schedule, parts)


def written(folder: Path, pipeline: str, plan: object) -> str:
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "configs_of_plans.py").write_text(CODE)
    (folder / "mine.toml").write_text(TEXT.format(pipeline=pipeline.replace("PLAN", str(folder / "plan.json"))))
    return str(folder / "mine.toml")


def refused(folder: Path, pipeline: str, plan: object) -> str:
    file = written(folder, pipeline, plan)
    with pytest.raises(FormatError) as caught:
        read_config(file)
    return str(caught.value).replace(str(folder), "")


def test_it_trains_by_the_plan(tmp_path):
    task = Request(written(tmp_path, 'plan = "PLAN"', {"plan": made().to_json()})).task()
    section = task.config.pipeline
    assert (section.stages, section.schedule, section.microbatches, section.chunks) == (2, "1f1b", 2, 1)
    pipe = task.pipeline()
    assert (pipe.split.cuts, pipe.microbatches) == ([("2", 0)], 2)
    assert [stage.settings.recompute for stage in pipe.stages] == ["always", "never"]
    losses = run(task).losses
    by_hand = Request(written(tmp_path, 'stages = 2\ncuts = ["2"]\nmicrobatches = 2', {})).task()
    assert run(by_hand).losses == losses


def test_it_trains_by_a_plan_with_replicas(tmp_path):
    task = Request(written(tmp_path, 'plan = "PLAN"', {"plan": made(replicas=2).to_json()})).task()
    section = task.config.pipeline
    assert (section.stages, section.replicas, section.counts, section.workers) == (2, [2, 1], [2, 1], 3)
    losses = run(task).losses
    by_hand = Request(written(tmp_path, 'stages = 2\nreplicas = [2, 1]\ncuts = ["2"]\nmicrobatches = 2', {})).task()
    assert run(by_hand).losses == losses


@pytest.mark.parametrize(("schedule", "warned"), [("1f1b", 0), ("2bw", 1)])
def test_training_by_an_asynchronous_plan_says_so(tmp_path, capsys, schedule, warned):
    """The config alone does not show it."""
    assert train(Request(written(tmp_path, 'plan = "PLAN"', made(schedule=schedule).to_json()))) == 0
    said = capsys.readouterr().out
    assert said.count(f"its schedule, {schedule}, is asynchronous: gradients are taken from older weights") == warned


def test_remedies_come_beside_a_plan(tmp_path):
    plan = made(schedule="pipemare").to_json()
    task = Request(written(tmp_path, 'plan = "PLAN"\noptions = {t1 = 3, t3 = 1}', plan)).task()
    assert task.config.pipeline.options == {"t1": 3, "t3": 1}
    assert task.pipeline().async_trainer.first == 1


@pytest.mark.parametrize(
    ("beside", "shown"),
    [("stages = 2", "2"), ("replicas = 1", "1"),
     ('cuts = ["2"]', "['2']"), ("chunks = 1", "1"), ('schedule = "1f1b"', '"1f1b"'),
     ("microbatches = 2", "2")],
)  # fmt: skip
def test_a_plan_stands_alone(tmp_path, beside, shown):
    said = refused(tmp_path, f'plan = "PLAN"\n{beside}', made().to_json())
    name = beside.split()[0]
    assert said == (
        f"/mine.toml: pipeline.{name}: expected nothing beside pipeline.plan, which sets it too, but got {shown}; "
        "leave out either"
    )


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    said = refused(tmp_path, 'plan = "PLAN"\nstages = 2\nmicrobatches = 9\nseed = -1', made().to_json())
    assert "3 of them" in said
    assert "pipeline.stages: expected nothing" in said
    assert "pipeline.microbatches: expected nothing" in said
    assert "pipeline.seed: expected a whole number" in said


@pytest.mark.parametrize(
    ("pipeline", "plan", "said"),
    [
        ('plan = "PLAN"', [], "pipeline.plan (/plan.json): expected one plan, but got a list"),
        ('plan = "PLAN"', {}, "pipeline.plan (/plan.json): expected the key 'stages' in a plan, but got none"),
        ('plan = "none.json"', {}, "pipeline.plan (none.json): expected a readable plan, but got No such file"),
        ("stages = 2\nplan = 3", {}, "pipeline.plan: expected a path, but got 3"),
        ('stages = 2\nplan = ""', {}, 'pipeline.plan: expected a path, but got ""'),
        ('plan = "PLAN"', made(schedule="1f2b").to_json(), "pipeline.schedule: expected the name of a method"),
        ('plan = "PLAN"\noptions = {policy = "pa"}', made().to_json(), "expected no options of the schedule beside"),
        ('plan = "PLAN"\noptions = {t1 = 3}', made().to_json(), "pipeline.options.t1: expected an asynchronous"),
        ('plan = "PLAN"\noptions = 3', made().to_json(), "pipeline.options: expected a table"),
        ('plan = "PLAN"', made(parts=9).to_json(), "training.batch: expected at least 9 rows"),
        ('plan = "PLAN"', made(replicas=9).to_json(), "training.batch: expected at least 9 rows, one for each replica"),
    ],
)  # fmt: skip
def test_one_fault_is_one_message(tmp_path, pipeline, plan, said):
    found = refused(tmp_path, pipeline, plan)
    assert said in found
    assert "of them" not in found


def test_one_fault_is_one_message_where_the_command_line_names_the_plan(tmp_path):
    """`--plan` takes the config's own schedule away, which was missed too."""
    file = written(tmp_path, 'stages = 2\nschedule = "gpipe"', {})
    changes = {"pipeline.stages": None, "pipeline.schedule": None, "pipeline.plan": str(tmp_path / "plan.json")}
    with pytest.raises(FormatError, match="expected the key 'stages' in a plan, but got none") as caught:
        read_config(file, changes)
    assert "of them" not in str(caught.value)


def test_a_plan_of_another_model_is_found_when_the_model_is_there(tmp_path):
    plan = Plan((StagePlan(0, 2), StagePlan(3, 6)), (0, 1), (((0,),), ((1,),)), "1f1b", 2)
    task = Request(written(tmp_path, 'plan = "PLAN"', plan.to_json())).task()
    with pytest.raises(InputError, match="a plan of the model's 6 layers, but got one of 7"):
        task.pipeline()


def test_methods_are_not_compared_by_a_plan(tmp_path):
    file = written(tmp_path, 'plan = "PLAN"', made().to_json())
    with pytest.raises(FormatError, match=r"mine.toml: pipeline.plan: expected pipeline.stages, for all methods"):
        compare(Request(file), CompareOptions(["1f1b"], inline=True))
