"""A gradient that is not finite is refused before anything of its update is applied, and named."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import plain
from fingerprint import differences, fingerprint
from penstock import InputError, Pipeline
from penstock.training.finite_gradients import all_finite

torch.set_num_threads(1)
ASYNC = ["pipedream", "2bw", "pipemare"]


def pipeline(given: plain.Case, **options) -> Pipeline:
    options = {"example": given.example, "stages": 2, "microbatches": 2, "loss": given.loss} | options
    return Pipeline(given.fresh(), optimizer=plain.adamw, **options)


@contextmanager
def poisoned(pipe: Pipeline, name: str, value: float):
    """One number of a weight's gradient, from now on."""

    def poison(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[1] = value
        return gradient

    handle = pipe.model.get_parameter(name).register_hook(poison)
    yield
    handle.remove()


def everything(pipe: Pipeline) -> dict:
    optimizers = {at: optimizer.state_dict() for at, optimizer in pipe.optimizers.optimizers.items()}
    schedulers = [scheduler.state_dict() for scheduler in pipe.optimizers.schedulers]
    counters = pipe.index, pipe.optimizers.steps, pipe.optimizers.weight, pipe.optimizers.good, pipe.optimizers.scale
    return copy.deepcopy({"optimizers": repr(optimizers), "schedulers": repr(schedulers), "counters": counters})


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("kind", "name", "stage", "options"),
    [
        ("mlp", "0.weight", 0, {"schedule": "1f1b"}),
        ("mlp", "14.bias", 1, {"schedule": "1f1b"}),
        ("mlp", "14.bias", 1, {"schedule": "1f1b", "clip": 1.0}),
        ("conv", "0.weight", 0, {"schedule": "zb-h1"}),
        ("mlp", "14.bias", 3, {"schedule": "interleaved", "chunks": 2}),
        ("gpt", "tokens.weight", 0, {"schedule": "gpipe", "precision": "bf16"}),
        ("gpt", "tokens.weight", 0, {"schedule": "gpipe", "recompute": "always"}),
    ],
)
def test_nothing_of_an_update_is_applied(kind, name, stage, options, value):
    """Not to weights, optimizers, schedulers or running averages; and the next batch trains as if it had not been."""
    dtype = torch.float32 if "precision" in options else torch.float64
    given = plain.case(kind, steps=3, dtype=dtype)
    name = next(known for known, _ in given.model.named_parameters() if known.endswith(name))
    pipe, other = (pipeline(given, lr_scheduler=halving, **options) for _ in range(2))
    pipe.step(*given.batches[0])
    with poisoned(pipe, name, value):
        before, model = everything(pipe), fingerprint(pipe.model)
        with pytest.raises(InputError) as refused:
            pipe.step(*given.batches[1])
        assert differences(model, fingerprint(pipe.model)) == []
        assert everything(pipe) == before
    kind = "nan" if value != value else "inf"
    count = pipe.model.get_parameter(name).numel()
    assert f"expected finite gradients, but got {kind} in 1 of {count} numbers of the gradient of {name}" in str(
        refused.value
    )
    assert f"of stage {stage} at step 1; nothing of this update was applied: lower the learning rate" in str(
        refused.value
    )
    losses = [one.step(*given.batches[at]).loss for one, at in ((other, 0), (pipe, 2), (other, 2))]
    assert losses[1] == losses[2]
    assert plain.off(plain.weights(pipe.model), plain.weights(other.model)) == 0


def test_a_refused_batch_does_not_get_among_accumulated_ones():
    """Three of four steps are kept, and another batch takes the place of the fourth."""
    given = plain.case("mlp", steps=5)
    pipe, other = (pipeline(given, accumulate=4) for _ in range(2))
    for batch in given.batches[:3]:
        pipe.step(*batch)
    with (
        poisoned(pipe, "0.weight", float("nan")),
        pytest.raises(InputError, match="finite gradients, but got nan in 1 of"),
    ):
        pipe.step(*given.batches[3])
    assert pipe.step(*given.batches[4]).updated
    for batch in (*given.batches[:3], given.batches[4]):
        other.step(*batch)
    assert plain.off(plain.weights(pipe.model), plain.weights(other.model)) == 0


def test_the_last_checkpoint_is_that_of_the_step_before(tmp_path):
    given = plain.case("mlp", steps=3)
    pipe, other = (pipeline(given) for _ in range(2))
    pipe.step(*given.batches[0])
    with poisoned(pipe, "0.weight", float("nan")), pytest.raises(InputError, match="finite gradients"):
        pipe.step(*given.batches[1])
    pipe.save(tmp_path / "after")
    other.load(tmp_path / "after")
    assert other.index == 1
    assert other.step(*given.batches[2]).loss == pipe.step(*given.batches[2]).loss


def test_large_gradients_whose_sum_overflows_are_finite():
    """Numbers are added up to be looked at."""
    given = plain.case("mlp", steps=1, dtype=torch.float32)
    pipe = Pipeline(
        given.fresh(), example=given.example, stages=2, microbatches=2, loss=given.loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-38),
    )  # fmt: skip
    handle = pipe.model.get_parameter("0.weight").register_hook(lambda gradient: torch.full_like(gradient, 1.5e38))
    assert pipe.step(*given.batches[0]).updated
    handle.remove()


def test_sparse_gradients_are_looked_at():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 1)).double()
    x = torch.arange(8)
    pipe = Pipeline(
        model, example=x, cuts=["1"], microbatches=2, loss=lambda out, _: out.square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1), verify=False,
    )  # fmt: skip
    pipe.step(x)
    before = plain.weights(model)
    handle = model[0].register_full_backward_hook(lambda module, given, made: None)
    handle.remove()
    model[0].weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(InputError, match=r"nan in 32 of 32 numbers of the gradient of 0\.weight of stage 0 at step 1"):
        pipe.step(x)
    assert plain.off(plain.weights(model), before) == 0


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("schedule", ASYNC)
def test_without_a_flush_the_stage_refuses_its_own_update(tmp_path, schedule, clip):
    """Other stages may have made theirs, so the pipeline goes on from a checkpoint only."""
    given = plain.case("mlp", steps=8)
    pipe = pipeline(given, schedule=schedule, clip=clip)
    assert len([*pipe.train(given.batches[:3])]) == 3
    pipe.save(tmp_path / "before")
    name = "4.weight"
    with poisoned(pipe, name, float("nan")), pytest.raises(InputError, match="expected finite gradients, but got"):
        for _ in pipe.train(given.batches[3:]):
            pass
    assert all(weight.isfinite().all() for weight in plain.weights(pipe.model).values())
    pipe.load(tmp_path / "before")
    assert pipe.index == 3
    other = pipeline(given, schedule=schedule, clip=clip)
    other.load(tmp_path / "before")
    losses = [[step.loss for step in one.train(given.batches[3:])] for one in (pipe, other)]
    assert losses[0] == losses[1]
    assert plain.off(plain.weights(pipe.model), plain.weights(other.model)) == 0


def test_without_a_flush_the_stage_and_the_weight_are_named():
    given = plain.case("mlp", steps=8)
    pipe = pipeline(given, schedule="pipedream")
    with (
        poisoned(pipe, "14.bias", float("inf")),
        pytest.raises(InputError, match=r"inf in 1 of \d+ numbers of the gradient of 14\.bias of stage 1 at step 0"),
    ):
        for _ in pipe.train(given.batches):
            pass


def test_fp16_skips_overflows_but_not_for_ever():
    """Infinities are the scaler's ordinary business; a gradient that is no number at any scale is the model's fault."""
    given = plain.case("mlp", steps=1, dtype=torch.float32)
    pipe = pipeline(given, precision="fp16")
    before = plain.weights(pipe.model)
    with poisoned(pipe, "0.weight", float("nan")):
        skipped = [pipe.step(*given.batches[0]).updated for _ in range(16)]
        assert not any(skipped)
        with pytest.raises(InputError, match="gradients that are finite under fp16 at some scale"):
            pipe.step(*given.batches[0])
    assert plain.off(plain.weights(pipe.model), before) == 0


NONSENSE = {
    "lr": lambda params: torch.optim.SGD(params, lr=float("nan")),
    "infinite lr": lambda params: torch.optim.AdamW(params, lr=float("inf")),
    "weight_decay": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=float("inf")),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=float("nan")),
    "eps": lambda params: torch.optim.AdamW(params, eps=float("inf")),
    "a group's lr": lambda params: torch.optim.SGD([{"params": params, "lr": float("nan")}], lr=0.1),
}


@pytest.mark.parametrize("which", NONSENSE)
def test_an_optimizer_with_settings_that_are_not_finite(which):
    given = plain.case("mlp")
    setting = which.split()[-1]
    with pytest.raises(InputError, match=f"expected a finite {setting} of .*, but got (nan|inf); correct {setting}"):
        Pipeline(given.fresh(), example=given.example, stages=2, loss=given.loss, optimizer=NONSENSE[which])


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_scheduler_that_makes_the_rate_no_number(schedule, clip):
    given = plain.case("mlp", steps=4)

    def ruined(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float("nan") if step == 2 else 1.0)

    pipe = pipeline(given, schedule=schedule, clip=clip, lr_scheduler=ruined)
    with pytest.raises(InputError, match=r"a finite learning rate, but got nan in the optimizer of stage \d at step 2"):
        for _ in pipe.train(given.batches):
            pass
    assert all(weight.isfinite().all() for weight in plain.weights(pipe.model).values())


def test_a_scheduler_that_begins_with_a_rate_that_is_no_number():
    given = plain.case("mlp")
    with pytest.raises(InputError, match="expected a finite lr of AdamW, but got nan"):
        pipeline(given, lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: float("nan")))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("schedule", ["1f1b", *ASYNC])
def test_an_optimizer_that_fails_halfway_ends_the_pipeline_until_a_load(tmp_path, stage, schedule):
    """One stage has the update and the other has not: nobody may train on, evaluate or save that."""
    given = plain.case("mlp", steps=8)

    class Failing(torch.optim.AdamW):
        def step(self, closure=None):
            assert not armed or self.param_groups[0]["params"][0] is not first, "no such luck"
            return super().step(closure)

    armed = False
    pipe, other = (
        Pipeline(
            given.fresh(), example=given.example, stages=2, microbatches=2, loss=given.loss, schedule=schedule,
            optimizer=lambda params: Failing(params, lr=0.01),
        )
        for _ in range(2)
    )  # fmt: skip
    first = pipe.optimizers.owned[stage][0]
    assert len([*pipe.train(given.batches[:3])]) == 3
    pipe.save(tmp_path / "before")
    armed = True
    with pytest.raises(AssertionError, match="no such luck"):
        for _ in pipe.train(given.batches[3:]):
            pass
    armed = False
    calls = [
        lambda: [*pipe.train(given.batches)], lambda: pipe.evaluate(given.batches), lambda: pipe.save(tmp_path / "x"),
        pipe.state_dict, lambda: pipe.forward(given.batches[0][0]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(
            InputError, match="a pipeline that can go on, but got one of which some stages may have an up"
        ):
            call()
    assert not (tmp_path / "x").exists()
    pipe.load(tmp_path / "before")
    assert len([*pipe.train(given.batches[3:])]) == 5
    other.load(tmp_path / "before")
    assert len([*other.train(given.batches[3:])]) == 5
    assert plain.off(plain.weights(pipe.model), plain.weights(other.model)) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("size", [3, 20_000])
def test_one_number_among_many_gradients_is_noticed(size, dtype, value):
    """Small gradients of one type are looked at together."""
    gradients = {nn.Parameter(torch.zeros(4)): torch.ones(4, dtype=kind) for kind in (torch.float32, torch.float64)}
    gradients |= {nn.Parameter(torch.zeros(2)): torch.ones(2, 3).t() for _ in range(3)}
    gradients[nn.Parameter(torch.zeros(1))] = odd = torch.ones(size, dtype=dtype)
    assert all_finite(gradients)
    odd[size // 2] = value
    assert not all_finite(gradients)
