"""What a step does with its numbers: weights of a loss, accumulation, clipping, precision, optimizers, extra losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plain
from penstock import Pipeline
from penstock.training import stage_optimizers

torch.set_num_threads(1)
F64 = torch.float64


def pipeline(given: plain.Case, **options) -> Pipeline:
    options = {"example": given.example, "stages": 2, "microbatches": 4, "loss": given.loss} | options
    return Pipeline(given.fresh(), **options)


@pytest.mark.parametrize("method", ["1f1b", "zb-h1"])
def test_sum_and_weight_with_ignored_tokens_is_the_whole_batchs_mean(method):
    given = plain.case("gpt")
    x, y = plain.with_ignored(8)
    whole = given.fresh()
    loss = plain.backward(whole, plain.mean_token_loss, x, y)
    pipe = pipeline(given, loss=plain.counted_token_loss, schedule=method)
    assert pipe.step(x, y).loss == pytest.approx(loss, rel=1e-12)
    assert plain.off(plain.gradients(pipe.model), plain.gradients(whole)) < 1e-12


@pytest.mark.parametrize("weight", [int, float, lambda w: w, lambda w: w.double().requires_grad_()])
def test_a_weight_may_be_a_number_or_a_tensor(weight):
    given = plain.case("mlp")

    def loss(out, target):
        return (out - target).square().sum(), weight(torch.tensor(target.numel()))

    whole = given.fresh()
    expected = plain.backward(whole, F.mse_loss, *given.batches[0])
    pipe = pipeline(given, loss=loss)
    assert pipe.step(*given.batches[0]).loss == pytest.approx(expected, rel=1e-12)
    assert plain.off(plain.gradients(pipe.model), plain.gradients(whole)) < 1e-12


def test_rows_of_unequal_micro_batches_count_alike():
    given = plain.case("mlp", rows=7)
    whole = given.fresh()
    expected = plain.backward(whole, given.loss, *given.batches[0])
    pipe = pipeline(given)  # 1, 2, 2, 2 rows
    assert pipe.step(*given.batches[0]).loss == pytest.approx(expected, rel=1e-12)
    assert plain.off(plain.gradients(pipe.model), plain.gradients(whole)) < 1e-12


def test_accumulation_over_three_steps_is_one_batch_of_all_their_rows():
    given = plain.case("gpt", steps=6)
    pipe = pipeline(given, optimizer=plain.adamw, accumulate=3)
    model = given.fresh()
    optimizer = plain.adamw(model.parameters())
    for at in (0, 3):
        x, y = (torch.cat([batch[side] for batch in given.batches[at : at + 3]]) for side in (0, 1))
        plain.backward(model, given.loss, x, y)
        optimizer.step()
        optimizer.zero_grad()
    assert [step.updated for step in pipe.train(given.batches)] == [False, False, True] * 2
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-10


def test_accumulation_weighs_steps_by_what_they_sum():
    given = plain.case("gpt")
    first, second = plain.with_ignored(8), (plain.tokens(8), plain.tokens(8))
    pipe = pipeline(given, loss=plain.counted_token_loss, accumulate=2)
    pipe.step(*first)
    pipe.step(*second)
    whole = given.fresh()
    plain.backward(whole, plain.mean_token_loss, torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]]))
    assert plain.off(plain.gradients(pipe.model), plain.gradients(whole)) < 1e-12


@pytest.mark.parametrize("method", ["1f1b", "zb-v"])
def test_clipping_by_the_global_norm_is_torchs_own(method):
    given = plain.case("gpt")
    pipe = pipeline(given, optimizer=plain.adamw, clip=0.05, schedule=method)
    model = given.fresh()
    optimizer = plain.adamw(model.parameters())
    for x, y in given.batches:
        plain.backward(model, given.loss, x, y)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        assert norm > 0.05, "nothing was clipped"
        assert pipe.step(x, y).gradient_norm == pytest.approx(norm.item(), rel=1e-12)
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-10


@pytest.mark.parametrize("method", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_bf16_autocast_has_the_bits_of_a_plain_autocast_loop(method, recompute):
    given = plain.case("mlp", dtype=torch.float32)
    model, device = given.fresh(), next(given.model.parameters()).device.type
    for a, b in zip(*(plain.parts_of(side, 4) for side in given.batches[0]), strict=True):
        with torch.autocast(device, torch.bfloat16):
            loss = given.loss(model(a), b)
        (loss * len(a) / 8).backward()
    pipe = pipeline(given, precision="bf16", schedule=method, recompute=recompute)
    pipe.step(*given.batches[0])
    assert plain.off(plain.gradients(pipe.model), plain.gradients(model)) < 1e-7
    exact = given.fresh()
    plain.backward(exact, given.loss, *given.batches[0])
    assert plain.off(plain.gradients(exact), plain.gradients(model)) > 1e-4, "autocast did nothing"


def test_a_users_own_autocast_around_the_step_works_with_recompute():
    given = plain.case("mlp", dtype=torch.float32)
    device = next(given.model.parameters()).device.type
    found = []
    for recompute in ("never", "always"):
        pipe = pipeline(given, recompute=recompute, verify=False)
        with torch.autocast(device, torch.bfloat16):
            pipe.step(*given.batches[0])
        found.append(plain.gradients(pipe.model))
    assert plain.off(found[1], found[0]) == 0


def test_fp16_scale_halves_on_an_overflow_of_one_stage_and_no_stage_updates():
    given = plain.case("mlp", dtype=torch.float32)
    pipe = pipeline(given, precision="fp16", optimizer=plain.adamw)
    assert pipe.step(*given.batches[0]).updated
    before, scale = plain.weights(pipe.model), pipe.optimizers.scale
    handle = pipe.model[0].weight.register_hook(lambda gradient: gradient * float("inf"))
    step = pipe.step(*given.batches[1])
    assert not step.updated
    assert pipe.optimizers.scale == scale / 2
    assert plain.off(plain.weights(pipe.model), before) == 0
    assert all(p.grad is None for p in pipe.model.parameters())
    handle.remove()
    assert pipe.step(*given.batches[2]).updated
    assert plain.off(plain.weights(pipe.model), before) > 0


def test_fp16_scale_grows_after_enough_updates(monkeypatch):
    monkeypatch.setattr(stage_optimizers, "GROW_AFTER", 3)
    given = plain.case("mlp", dtype=torch.float32)
    pipe = pipeline(given, precision="fp16", optimizer=plain.adamw)
    scales = []
    for batch in given.batches:
        scales.append(pipe.optimizers.scale)
        pipe.step(*batch)
    assert scales == [2.0**16] * 3 + [2.0**17] * 2


def test_fp16_gives_the_weights_of_a_plain_loop_with_torchs_scaler():
    given = plain.case("mlp", dtype=torch.float32)
    device = next(given.model.parameters()).device.type
    model, scaler = given.fresh(), torch.amp.GradScaler(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in given.batches:
        for a, b in zip(plain.parts_of(x, 4), plain.parts_of(y, 4), strict=True):
            with torch.autocast(device, torch.float16):
                loss = given.loss(model(a), b) * (len(a) / len(x))
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    pipe = pipeline(given, precision="fp16", optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    assert all(step.updated for step in pipe.train(given.batches))
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-3


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "zb-h1", "zb-v"])
def test_balance_losses_of_middle_stages_are_those_of_a_micro_batch_loop(method):
    torch.manual_seed(1)
    data = [(torch.randn(8, 6, dtype=F64), torch.randn(8, 6, dtype=F64)) for _ in range(5)]
    given = plain.Case(plain.Mixture().to(F64), lambda out, y: F.mse_loss(out[0], y) + 0.1 * out[1], data)
    losses, model = plain.trained(given, parts=4)
    pipe = pipeline(given, optimizer=plain.adamw, schedule=method)  # and no warning about hidden weights
    assert [step.loss for step in pipe.train(data)] == pytest.approx(losses, rel=1e-12)
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-10


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=5),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_follow_the_scheduler_on_every_stage(name):
    given = plain.case("mlp")
    model = given.fresh()
    optimizer = plain.adamw(model.parameters())
    scheduler = SCHEDULERS[name](optimizer)
    pipe = pipeline(given, optimizer=plain.adamw, lr_scheduler=SCHEDULERS[name])
    for x, y in given.batches:
        loss = plain.backward(model, given.loss, x, y)
        optimizer.step()
        scheduler.step(loss) if name == "plateau" else scheduler.step()
        optimizer.zero_grad()
        pipe.step(x, y)
        rates = {group["lr"] for one in pipe.optimizers.optimizers.values() for group in one.param_groups}
        assert rates == {optimizer.param_groups[0]["lr"]}
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-10


def test_an_optimizer_of_two_arguments_gets_names_for_its_groups():
    given = plain.case("gpt")

    def groups(names, params):
        named = list(zip(names, params, strict=True))
        decayed = [p for name, p in named if not name.endswith("bias")]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.3}, {"params": [p for n, p in named if n.endswith("bias")]}],
            lr=1e-2,
            weight_decay=0.0,
        )

    model = given.fresh()
    optimizer = groups(*zip(*model.named_parameters(), strict=True))
    for x, y in given.batches:
        plain.backward(model, given.loss, x, y)
        optimizer.step()
        optimizer.zero_grad()
    pipe = pipeline(given, optimizer=groups, stages=4)
    list(pipe.train(given.batches))
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-10


def test_an_optimizer_class_or_partial_will_do():
    given = plain.case("mlp")
    _, model = plain.trained(given, make=torch.optim.SGD)
    pipe = pipeline(given, optimizer=torch.optim.SGD)
    list(pipe.train(given.batches))
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-10


@pytest.mark.parametrize("method", ["1f1b", "zb-h1"])
def test_stages_without_parameters(method):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Sigmoid(), nn.Linear(6, 6)).to(F64)
    given = plain.Case(model, F.mse_loss, plain.case("mlp").batches)
    losses, trained = plain.trained(given)
    pipe = pipeline(given, cuts=["1", "2", "3"], stages=4, schedule=method, optimizer=plain.adamw, clip=1e9)
    assert [step.loss for step in pipe.train(given.batches)] == pytest.approx(losses, rel=1e-12)
    assert plain.off(plain.weights(pipe.model), plain.weights(trained)) < 1e-10


@pytest.mark.parametrize("method", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("frozen", ["first stage", "last stage", "a middle layer", "biases"])
def test_frozen_parameters_stay_and_the_rest_is_right(method, frozen):
    kinds = {
        "first stage": lambda n: int(n.split(".")[0]) < 8,
        "last stage": lambda n: int(n.split(".")[0]) >= 8,
        "a middle layer": lambda n: n.startswith("6."),
        "biases": lambda n: n.endswith("bias"),
    }
    given = plain.case("mlp")
    for name, parameter in given.model.named_parameters():
        parameter.requires_grad_(not kinds[frozen](name))
    losses, model = plain.trained(given)
    pipe = pipeline(given, optimizer=plain.adamw, schedule=method)
    assert [step.loss for step in pipe.train(given.batches)] == pytest.approx(losses, rel=1e-12)
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-10
    assert all(stage.forwards == 4 * 5 for stage in pipe.stages)  # a frozen stage is not run a second time


def test_parameters_unfrozen_between_steps_learn():
    given = plain.case("mlp")
    for parameter in given.model[:8].parameters():
        parameter.requires_grad_(False)
    model, pipe = given.fresh(), pipeline(given)
    for one in (model, pipe.model):
        one.zero_grad()
    for x, y in given.batches[:2]:
        plain.backward(model, given.loss, x, y)
        pipe.step(x, y)
        for one in (model, pipe.model):
            one.requires_grad_(True)
    assert len(plain.gradients(model)) == 16
    assert plain.off(plain.gradients(pipe.model), plain.gradients(model)) < 1e-12


class TiedEarly(nn.Module):
    """A weight that the first two of three stages share."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=F64) for _ in range(4))
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("method", ["1f1b", "zb-h1"])
def test_a_loss_may_keep_weights_small_also_tied_ones(method):
    torch.manual_seed(3)
    model, given = TiedEarly(), plain.case("mlp")

    def small(weights):
        return lambda out, target: F.mse_loss(out, target) + 0.1 * sum(w.square().sum() for w in weights)

    whole, (x, y) = TiedEarly(), given.batches[0]
    whole.load_state_dict(model.state_dict())
    loss = plain.backward(whole, small(list(whole.parameters())), x, y)
    pipe = Pipeline(
        model, example=given.example, stages=3, cuts=["layers.1", "layers.2"], microbatches=4, schedule=method,
        loss=small(list(model.parameters())),
    )  # fmt: skip
    assert pipe.step(x, y).loss == pytest.approx(loss, rel=1e-12)
    assert plain.off(plain.gradients(model), plain.gradients(whole)) < 1e-12


def test_clipping_without_an_optimizer_clips_what_is_handed_out():
    given = plain.case("mlp")
    pipe = Pipeline(given.fresh(), example=given.example, stages=2, microbatches=4, loss=given.loss, clip=1e-3)
    step = pipe.step(*given.batches[0])
    found = torch.nn.utils.get_total_norm([p.grad for p in pipe.model.parameters()])
    assert float(found) == pytest.approx(1e-3, rel=1e-2)
    assert step.gradient_norm > 1e-2


def test_fp16_without_an_optimizer_hands_out_no_overflow():
    given = plain.case("mlp", dtype=torch.float32)
    huge = lambda out, target: given.loss(out, target) * 1e30  # noqa: E731
    pipe = Pipeline(
        given.fresh(), example=given.example, stages=2, microbatches=4, loss=huge, precision="fp16", verify=False
    )
    scale = pipe.optimizers.scale
    pipe.step(*given.batches[0])
    assert pipe.optimizers.scale == scale / 2
    assert all(p.grad is None for p in pipe.model.parameters())


def test_clipping_of_sparse_gradients_is_that_of_dense_ones():
    def trained(sparse: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 4)).double()
        pipe = Pipeline(
            model, example=torch.randint(0, 9, (2, 3)), stages=2, microbatches=4, clip=0.01,
            loss=lambda out, _: out.square().mean(), optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        )  # fmt: skip
        pipe.step(torch.arange(24).view(8, 3) * 5 % 9)
        return model[0].weight.detach()

    assert torch.allclose(trained(True), trained(False), rtol=1e-12)


def test_an_interrupt_inside_an_optimizer_leaves_no_gradient_for_the_next_step():
    class Interrupted(torch.optim.SGD):
        calls = 0

        def step(self, closure=None):
            Interrupted.calls += 1
            if Interrupted.calls == 2:
                raise KeyboardInterrupt
            return super().step(closure)

    given = plain.case("mlp")
    pipe = Pipeline(
        given.fresh(), example=given.example, stages=2, microbatches=4, loss=given.loss,
        optimizer=lambda params: Interrupted(params, lr=0.1),
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        pipe.step(*given.batches[0])
    assert all(p.grad is None for p in pipe.model.parameters())
