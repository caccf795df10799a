"""Recompute, offload and sizes: what a stage keeps and how often it runs changes no bit of a gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import plain
from penstock import InputError, Pipeline

torch.set_num_threads(1)
METHODS = ["gpipe", "1f1b", "zb-h1", "zb-v"]


def pipeline(given: plain.Case, **options) -> Pipeline:
    options = {"stages": 2, "microbatches": 4, "loss": given.loss} | options
    return Pipeline(given.fresh(), example=given.example, **options)


def after_a_step(given: plain.Case, **options) -> tuple[Pipeline, dict[str, torch.Tensor]]:
    pipe = pipeline(given, **options)
    pipe.step(*given.batches[0])
    return pipe, {name: gradient.to(pipe.device) for name, gradient in plain.gradients(pipe.model).items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["gpt", "conv"])
@pytest.mark.parametrize(("recompute", "forwards"), [("never", 4), ("except-last", 7), ("always", 8)])
def test_recompute_runs_a_forward_at_most_twice_and_changes_no_bit(method, kind, recompute, forwards):
    given = plain.case(kind)
    _, wanted = after_a_step(given, schedule=method)
    pipe, found = after_a_step(given, schedule=method, recompute=recompute)
    assert plain.off(found, wanted) <= plain.BITS
    assert {stage.forwards for stage in pipe.stages} == {forwards}
    assert not any(stage.kept or stage.queues for stage in pipe.stages)


def test_a_layers_own_calls_are_counted_too():
    """Recompute with a split backward once ran a block's forward once per parameter group: eight times."""
    given = plain.case("gpt")
    calls = []
    pipe = pipeline(given, schedule="zb-h1", recompute="always", verify=False)
    pipe.step(*given.batches[0])
    for block in pipe.model.blocks:
        block.register_forward_hook(lambda *_: calls.append(1))
    pipe.step(*given.batches[1])
    assert len(calls) == 2 * 4 * len(pipe.model.blocks)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("offload", [True, "activations", "weights", "all"])
def test_offload_changes_no_bit(method, recompute, offload):
    given = plain.case("gpt")
    _, wanted = after_a_step(given, schedule=method)
    _, found = after_a_step(given, schedule=method, recompute=recompute, offload=offload)
    assert plain.off(found, wanted) <= plain.BITS


@pytest.mark.parametrize("offload", ["activations", "weights", "all"])
@pytest.mark.parametrize("kind", ["gpt", "conv"])
def test_training_with_offload_has_the_same_weights(offload, kind):
    given = plain.case(kind)
    found = []
    for option in (False, offload):
        pipe = pipeline(given, offload=option, optimizer=plain.adamw, stages=4)
        losses = [step.loss for step in pipe.train(given.batches)]
        score = pipe.evaluate(given.batches)
        pipe.load_state_dict(pipe.state_dict())
        weights = {name: weight.cpu() for name, weight in plain.weights(pipe.model).items()}
        found.append((losses, score, weights))
    assert found[1][0] == pytest.approx(found[0][0], rel=plain.BITS, abs=0)
    assert found[1][1] == pytest.approx(found[0][1], rel=plain.BITS, abs=0)
    assert plain.off(found[1][2], found[0][2]) <= plain.BITS * 100


def test_an_offload_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="activations, weights or all, but got 'disk'"):
        pipeline(plain.case("mlp"), offload="disk")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [4, 5, 7, 12])
def test_batches_that_do_not_divide(method, rows):
    given = plain.case("gpt", rows=rows)
    whole = given.fresh()
    loss = plain.backward(whole, given.loss, *given.batches[0])
    pipe, found = after_a_step(given, schedule=method)
    assert plain.off(found, plain.gradients(whole)) < 1e-12
    assert pipe.evaluate(given.batches[:1]) == pytest.approx(loss, rel=1e-12)


def test_sizes_and_lengths_that_change_from_step_to_step():
    given = plain.case("gpt")
    pipe, model = pipeline(given, optimizer=plain.adamw, stages=4), given.fresh()
    optimizer = plain.adamw(model.parameters())
    for rows, length in ((8, 6), (5, 9), (16, 3), (4, 1), (7, 16), (8, 6)):
        x, y = plain.tokens(rows, length), plain.tokens(rows, length)
        loss = plain.backward(model, given.loss, x, y)
        optimizer.step()
        optimizer.zero_grad()
        assert pipe.step(x, y).loss == pytest.approx(loss, rel=1e-12)
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-10


def test_train_eval_forward_and_step_in_any_order():
    given = plain.case("conv")
    pipe, model = pipeline(given, optimizer=plain.adamw), given.fresh()
    optimizer = plain.adamw(model.parameters())
    x = given.batches[0][0]

    def step(x, y):
        loss = plain.backward(model, given.loss, x, y, 4)
        optimizer.step()
        optimizer.zero_grad()
        assert pipe.step(x, y).loss == pytest.approx(loss, rel=1e-9)

    pipe.evaluate(given.batches)
    step(*given.batches[0])
    pipe.model.eval()
    assert pipe.forward(x).shape == (8, 3)
    pipe.model.train()
    step(*given.batches[1])
    pipe.evaluate(given.batches[:1])
    pipe.evaluate(given.batches)
    step(*given.batches[2])
    assert pipe.model.training
    assert plain.off(plain.weights(pipe.model), plain.weights(model)) < 1e-10


def test_a_step_trains_also_where_gradients_are_switched_off():
    given = plain.case("mlp")
    _, wanted = after_a_step(given)
    with torch.no_grad():
        _, found = after_a_step(given)
    assert plain.off(found, wanted) <= plain.BITS


def test_training_in_eval_mode_is_fine_tuning_without_dropout():
    given = plain.case("conv")
    given.model.eval()
    whole = given.fresh()
    plain.backward(whole, given.loss, *given.batches[0])
    _, found = after_a_step(given)
    assert plain.off(found, plain.gradients(whole)) < 1e-12


def test_stages_keep_nothing_after_a_step_and_nothing_in_a_forward_without_gradients():
    given = plain.case("gpt")
    pipe, _ = after_a_step(given, schedule="gpipe")
    pipe.forward(given.batches[0][0])
    assert not any(stage.kept or stage.queues for stage in pipe.stages)
    assert not pipe.forward(given.batches[0][0]).requires_grad


def test_offloaded_weights_are_saved_once_and_not_by_activation_offload():
    """What autograd saves of a weight is the weight: no copy of it goes to the host with every micro-batch."""
    from penstock.model.offload import Offload, saving

    layer = torch.nn.Linear(6, 6)
    x = torch.randn(4, 6, requires_grad=True)
    with saving(Offload.ALL, layer.parameters()):
        y = layer(F.relu(x))
    with torch.no_grad():
        layer.weight.data = layer.weight.data.clone()  # as a swap does
    y.sum().backward()
    assert torch.equal(x.grad, (torch.ones(4, 6) @ layer.weight) * (x > 0))


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_hook_that_a_forward_puts_on_a_tensor_fires_once_a_micro_batch(recompute):
    class Hooked(torch.nn.Linear):
        fired = 0

        def forward(self, x):
            x.register_hook(self.count)
            return super().forward(x)

        def count(self, gradient):
            self.fired += 1
            return gradient * 2

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), Hooked(6, 6), torch.nn.Linear(6, 6)).double()
    given = plain.Case(model, F.mse_loss, plain.case("mlp").batches)
    whole = given.fresh()
    plain.backward(whole, given.loss, *given.batches[0])
    pipe = pipeline(given, cuts=["2"], recompute=recompute)
    pipe.model[2].fired = 0
    pipe.step(*given.batches[0])
    assert pipe.model[2].fired == 4
    assert plain.off(plain.gradients(pipe.model), plain.gradients(whole)) < 1e-12


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_layer_that_differentiates_in_its_own_forward(recompute):
    class Force(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = torch.nn.Linear(6, 1)

        def forward(self, x):
            (force,) = torch.autograd.grad(torch.tanh(self.energy(x)).sum(), x, create_graph=True)
            return x - force

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), Force(), torch.nn.Linear(6, 6), Force()).double()
    given = plain.Case(model, F.mse_loss, plain.case("mlp").batches)
    whole = given.fresh()
    plain.backward(whole, given.loss, *given.batches[0])
    _, found = after_a_step(given, cuts=["2"], recompute=recompute)
    assert plain.off(found, plain.gradients(whole)) < 1e-12
