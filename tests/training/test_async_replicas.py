"""Replicated stages without a flush, against recursions that share no code with the engine: all losses, all weights."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
import recursion_models
from penstock import InputError
from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow
from penstock.core.plan import Plan, StagePlan
from penstock.engine.observer import Observer
from penstock.training.runnable_plans import refusal
from recursion_models import Model
from segments import ADAMW, MOMENTUM, SGD, WITHIN, Method, Recursion, Rule, off, optimizer, pipeline, trained, weights
from turns import Turns, replica_of, version_of

torch.set_num_threads(1)

MODELS = {
    "chain": lambda n: recursion_models.chain(n, width=3),
    "conv": lambda n: recursion_models.conv_net(n, channels=2, side=3),
    "gpt": lambda n: recursion_models.gpt(n, tied=False, width=4, length=3),
}


def turns_pipeline(model: Model, replicas: list[int], rule: Rule, m: int = 1, **more: Any):
    return pipeline(model, Method("pipedream", m), rule, replicas=replicas, **more)


def agree(pipe: Any, reference: Any, batches: list) -> None:
    losses = reference.run(batches)
    assert trained(pipe, batches) == pytest.approx(losses, abs=WITHIN)
    assert off(weights(pipe), reference.weights()) < WITHIN


class Recorder(Observer):
    """Which replica ran a mini-batch, and by which version."""

    def __init__(self) -> None:
        self.ran: dict[tuple[Op, int, int], tuple[int, int]] = {}

    def stage_begins(self, row: ActionRow) -> None:
        assert (row.op, row.stage, row.microbatch) not in self.ran
        self.ran[row.op, row.stage, row.microbatch] = row.replica, row.version


@pytest.mark.parametrize("replicas", [[2, 1], [3, 1], [2, 1, 1], [1, 2], [2, 3]], ids=str)
def test_replica_and_version_of_every_mini_batch_are_those_of_the_method(replicas):
    model, recorder = MODELS["chain"](len(replicas)), Recorder()
    pipe = turns_pipeline(model, replicas, SGD)
    pipe.observers.add(recorder)
    trained(pipe, model.batches(40, rows=2))
    expected = {
        (op, stage, k): (replica_of(replicas, stage, k), version_of(replicas, stage, k))
        for op in (Op.F, Op.B)
        for stage in range(len(replicas))
        for k in range(40)
    }
    assert recorder.ran == expected


@pytest.mark.parametrize("rule", [SGD, MOMENTUM, ADAMW], ids=["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("replicas", [[2, 1], [3, 1], [2, 1, 1]], ids=str)
def test_the_recursion_over_forty_mini_batches(replicas, rule):
    model = MODELS["chain"](len(replicas))
    batches = model.batches(40, rows=3)
    agree(turns_pipeline(model, replicas, rule), Turns(model, replicas, rule), batches)


@pytest.mark.parametrize(
    ("kind", "replicas", "m", "more"),
    [
        ("conv", [2, 1], 1, {}),
        ("gpt", [2, 1, 1], 1, {}),
        ("chain", [2], 1, {}),
        ("chain", [1, 2], 1, {}),
        ("chain", [2, 3], 1, {}),
        ("chain", [1, 2, 1], 1, {}),
        ("chain", [3, 2, 2], 1, {}),
        ("conv", [1, 3], 2, {}),
        ("chain", [2, 1], 3, {}),
        ("gpt", [2, 1], 2, {"recompute": "always"}),
        ("chain", [2, 1, 1], 1, {"clip": 0.05}),
        ("conv", [2, 3], 2, {"clip": 0.3}),
    ],
    ids=str,
)
def test_other_models_replicas_micro_batches_and_clipping_by_stage(kind, replicas, m, more):
    model = MODELS[kind](len(replicas))
    reference = Turns(model, replicas, ADAMW, m, more.get("clip"))
    agree(turns_pipeline(model, replicas, ADAMW, m, **more), reference, model.batches(23, rows=4))


@pytest.mark.parametrize("replicas", [[2, 1], [2, 1, 1], [1, 2], [3, 2]], ids=str)
def test_vertical_sync(replicas):
    model = MODELS["chain"](len(replicas))
    reference = Turns(model, replicas, MOMENTUM, vertical=True)
    agree(turns_pipeline(model, replicas, MOMENTUM, vertical_sync=True), reference, model.batches(23, rows=2))


@pytest.mark.parametrize("replicas", [[3, 1], [2, 3], [3]], ids=str)
def test_runs_of_every_length_average_what_their_last_round_has(replicas):
    """Each run drains; the next one fills again and counts from the first replica."""
    model = MODELS["chain"](len(replicas))
    pipe, reference = turns_pipeline(model, replicas, MOMENTUM), Turns(model, replicas, MOMENTUM)
    for length in range(1, 14):
        agree(pipe, reference, model.batches(length, rows=2, seed=length))


def test_mini_batches_of_unequal_rows_count_alike_in_their_round():
    model = MODELS["chain"](2)
    every = model.batches(9, rows=6)
    rows = [6, 2, 1, 6, 3, 6, 6, 1, 1]
    batches = [(x[:count], y[:count]) for (x, y), count in zip(every, rows, strict=True)]
    agree(turns_pipeline(model, [2, 1], SGD, 3), Turns(model, [2, 1], SGD, 3), batches)


def cut_short(pipe: Any, batches: list, after: int, between: Any) -> tuple[int, list[float]]:
    """Train, and do something when record `after` is out. Returns how many mini-batches had been taken in by then, and
    all losses."""
    taken, losses = 0, []
    for record in pipe.train(batches):
        losses.append(record.loss)
        if record.index == after:
            taken = pipe.async_trainer.fed
            between(pipe)
    return taken, losses


@pytest.mark.parametrize("replicas", [[2, 1], [2, 1, 1], [2, 3]], ids=str)
def test_an_evaluation_in_the_loop_drains_what_was_taken_in_and_the_pipe_fills_again(replicas):
    model = MODELS["chain"](len(replicas))
    pipe, reference = turns_pipeline(model, replicas, ADAMW), Turns(model, replicas, ADAMW)
    batches, scored = model.batches(23, rows=3), []
    taken, losses = cut_short(pipe, batches, 6, lambda pipe: scored.append(pipe.evaluate(batches[:2])))
    assert 6 < taken < 23
    expected = reference.run(batches[:taken])
    wanted = [reference.loss_of(batch) for batch in batches[:2]]
    expected += reference.run(batches[taken:])
    assert losses == pytest.approx(expected, abs=WITHIN)
    assert scored == pytest.approx([sum(wanted) / 2], abs=WITHIN)
    assert off(weights(pipe), reference.weights()) < WITHIN


def test_a_loop_that_is_left_trains_what_was_taken_in():
    model = MODELS["chain"](2)
    pipe, reference = turns_pipeline(model, [3, 1], MOMENTUM), Turns(model, [3, 1], MOMENTUM)
    batches = model.batches(20, rows=2)
    for record in pipe.train(batches):
        if record.index == 4:
            taken = pipe.async_trainer.fed
            break
    reference.run(batches[:taken])
    assert pipe.index == taken
    assert off(weights(pipe), reference.weights()) < WITHIN


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_single_step_is_a_synchronous_one(clip):
    """Its norm is that of all gradients; the first replica of each stage runs it."""
    model = MODELS["chain"](3)
    pipe = turns_pipeline(model, [2, 1, 2], ADAMW, clip=clip)
    reference = Recursion(model, Method("1f1b"), ADAMW, clip=clip)
    batches = model.batches(4, rows=3)
    steps = [pipe.step(*batch) for batch in batches]
    assert [step.loss for step in steps] == pytest.approx([reference.step(batch) for batch in batches], abs=WITHIN)
    assert [step.gradient_norm is None for step in steps] == [clip is None] * 4
    assert off(weights(pipe), reference.weights()) < WITHIN


def test_a_checkpoint_in_the_loop_is_gone_on_from_with_the_same_bits(tmp_path):
    model, other = MODELS["chain"](2), MODELS["chain"](2)
    pipe, again = (turns_pipeline(one, [2, 1], ADAMW) for one in (model, other))
    batches = model.batches(17, rows=3)
    taken, losses = cut_short(pipe, batches, 5, lambda pipe: pipe.save(tmp_path / "six"))
    trained(again, model.batches(3, rows=3, seed=9))
    again.load(tmp_path / "six")
    assert trained(again, batches[taken:]) == losses[taken:]
    assert off(weights(again), weights(pipe)) == 0


def test_one_process_takes_up_a_checkpoint_of_replicas(tmp_path):
    model, other = MODELS["chain"](2), MODELS["chain"](2)
    pipe, again = turns_pipeline(model, [2, 1], ADAMW), pipeline(other, Method("pipedream"), ADAMW)
    reference = Turns(model, [2, 1], ADAMW)
    batches = model.batches(12, rows=3)
    trained(pipe, batches[:7])
    reference.run(batches[:7])
    pipe.save(tmp_path / "seven")
    again.load(tmp_path / "seven")
    reference.replicas = [1, 1]
    agree(again, reference, batches[7:])


def test_batch_norm_s_averages_are_those_of_all_mini_batches_in_order():
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2))).double()
    batches = [(torch.randn(4, 3).double(), torch.randn(4, 3).double()) for _ in range(9)]
    plain = copy.deepcopy(module)
    pipe = penstock.Pipeline(
        module, example=batches[0][0], stages=2, cuts=["1"], schedule="pipedream", microbatches=1, replicas=[2, 1],
        loss=F.mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.0), verify=False,
    )  # fmt: skip
    losses = [step.loss for step in pipe.train(batches)]
    assert losses == pytest.approx([F.mse_loss(plain(x), y).item() for x, y in batches], abs=WITHIN)
    assert off(dict(module.named_buffers()), dict(plain.named_buffers())) < WITHIN


def test_dropout_differs_from_mini_batch_to_mini_batch_and_is_the_same_again():
    def run() -> list[float]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 8), nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3)))
        pipe = penstock.Pipeline(
            module, example=torch.ones(2, 3), stages=2, cuts=["1"], schedule="pipedream", microbatches=1,
            replicas=[1, 2], loss=F.mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.0), verify=False,
        )  # fmt: skip
        return [step.loss for step in pipe.train([(torch.ones(2, 3), torch.zeros(2, 3))] * 8)]

    losses = run()
    assert run() == losses
    assert len(set(losses)) == 8


def test_an_lr_scheduler_goes_by_rounds_and_sees_their_mean_loss():
    seen: list[float] = []

    class Watching(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: float, epoch: int | None = None) -> None:
            seen.append(float(metrics))

    model = MODELS["chain"](1)
    pipe = turns_pipeline(model, [2], SGD, lr_scheduler=Watching)
    losses = trained(pipe, model.batches(5, rows=2))
    assert seen == [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2, losses[4]]


def test_a_switch_to_a_synchronous_schedule_and_back():
    model = MODELS["chain"](2)
    pipe, reference = turns_pipeline(model, [2, 2], ADAMW), Turns(model, [2, 2], ADAMW)
    batches = model.batches(12, rows=4)
    agree(pipe, reference, batches[:5])
    pipe.switch("1f1b", microbatches=2)
    for batch in batches[5:8]:
        assert pipe.step(*batch).loss == pytest.approx(reference.run([batch])[0], abs=WITHIN)
    pipe.switch("pipedream", microbatches=1)
    agree(pipe, reference, batches[8:])


@pytest.mark.parametrize("stage", [0, 1])
def test_an_exception_in_mid_flight_ends_a_pipeline_in_one_process(stage):
    model = MODELS["chain"](2)
    pipe = turns_pipeline(model, [2, 1], SGD)
    calls: list[int] = []

    def fail(module: nn.Module, given: Any) -> None:
        calls.append(1)
        if len(calls) == 7:
            raise ZeroDivisionError("no such luck")

    model.module[stage].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        trained(pipe, model.batches(12, rows=2))
    with pytest.raises(InputError, match=r"a pipeline that can go on.*ZeroDivisionError: no such luck"):
        pipe.step(*model.batches(1, rows=2)[0])


def test_tied_weights_of_replicated_stages_are_refused_before_anything_runs():
    model = recursion_models.gpt(2, width=4, length=3)
    with pytest.raises(
        InputError, match=r"weights of stages with replicas that one stage uses alone.*stages 0, 1 share"
    ):
        turns_pipeline(model, [2, 1], SGD)


def test_tied_weights_of_other_stages_are_trained_by_the_recursion():
    model = recursion_models.chain(4, width=3, tied=(0, 1))
    agree(
        turns_pipeline(model, [1, 1, 2, 1], MOMENTUM), Turns(model, [1, 1, 2, 1], MOMENTUM), model.batches(15, rows=2)
    )


def test_a_run_is_measured_row_by_row():
    model = MODELS["chain"](2)
    pipe = turns_pipeline(model, [2, 1], SGD)
    trained(pipe, model.batches(7, rows=2))
    timeline = pipe.timeline()
    assert timeline.schedule.shape.replicas == (2, 1)
    assert timeline.schedule.shape.batches == 7
    assert (timeline.end >= timeline.start).all()


@pytest.mark.parametrize(("schedule", "options"), [("pipemare", ()), ("pipedream", (("stash", False),))])
def test_a_plan_with_replicas_that_do_not_stash_weights_is_said_not_to_be_trained(schedule, options):
    stages, devices = (StagePlan(0, 0), StagePlan(1, 1)), (((2,), (1,)), ((5,),))
    error = refusal(Plan(stages, (0, 1), devices, schedule, 2, options=options))
    assert re.search(rf"one replica where weights are not stashed.*got 2 under {schedule}", str(error))
    assert refusal(Plan(stages, (0, 1), (((2,),), ((5,),)), schedule, 2, options=options)) is None


def test_a_plan_with_replicas_is_run_as_planned():
    model = MODELS["chain"](2)
    plan = Plan((StagePlan(0, 0), StagePlan(1, 1)), (0, 1), (((2,), (1,)), ((5,),)), "pipedream", 1)
    pipe = penstock.Pipeline(
        model.module, example=model.batches(1, 2)[0][0], plan=plan, loss=model.loss, verify=False,
        optimizer=optimizer(MOMENTUM),
    )  # fmt: skip
    agree(pipe, Turns(model, [2, 1], MOMENTUM), model.batches(9, rows=2))
