"""What was seen to be silently wrong elsewhere and concerns numbers. Each is right here."""

from __future__ import annotations

import pytest
import torch

import plain
from penstock import Pipeline
from penstock.engine.observer import Observer

torch.set_num_threads(1)


def pipeline(given: plain.Case, **options) -> Pipeline:
    options = {"stages": 2, "microbatches": 4, "loss": given.loss} | options
    return Pipeline(given.fresh(), example=given.example, **options)


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "zb-h1"])
def test_two_steps_without_zeroing_sum_their_gradients(method):
    """Elsewhere all that had come so far was divided again: 1.25 of one gradient instead of their sum."""
    given = plain.case("gpt")
    pipe, model = pipeline(given, schedule=method), given.fresh()
    for x, y in given.batches[:2]:
        pipe.step(x, y)
        plain.backward(model, given.loss, x, y)
    assert plain.off(plain.gradients(pipe.model), plain.gradients(model)) < 1e-12


def test_an_evaluation_between_steps_leaves_pending_gradients_alone():
    """Elsewhere `eval()` divided them."""
    given = plain.case("gpt")
    pipe = pipeline(given)
    pipe.step(*given.batches[0])
    before = plain.gradients(pipe.model)
    pipe.evaluate(given.batches)
    pipe.forward(given.batches[1][0])
    assert plain.off(plain.gradients(pipe.model), before) == 0
    accumulating, model = pipeline(given, accumulate=2), given.fresh()
    accumulating.step(*given.batches[0])
    accumulating.evaluate(given.batches)
    accumulating.step(*given.batches[1])
    x, y = (torch.cat([batch[side] for batch in given.batches[:2]]) for side in (0, 1))
    plain.backward(model, given.loss, x, y)
    assert plain.off(plain.gradients(accumulating.model), plain.gradients(model)) < 1e-12


def test_a_persons_own_gradients_are_added_to_not_divided():
    given = plain.case("mlp")
    pipe, model = pipeline(given), given.fresh()
    for one in (pipe.model, model):
        plain.backward(one, given.loss, *given.batches[0])
    pipe.step(*given.batches[1])
    plain.backward(model, given.loss, *given.batches[1])
    assert plain.off(plain.gradients(pipe.model), plain.gradients(model)) < 1e-12


def test_gradients_are_averaged_over_micro_batches_not_summed():
    given = plain.case("mlp", rows=8)
    found = []
    for parts in (1, 2, 4, 8):
        pipe = pipeline(given, microbatches=parts)
        pipe.step(*given.batches[0])
        found.append(plain.gradients(pipe.model))
    assert all(plain.off(one, found[0]) < 1e-12 for one in found)


def test_batch_6_in_4_micro_batches():
    given = plain.case("gpt", rows=6)
    pipe, model = pipeline(given), given.fresh()
    pipe.step(*given.batches[0])
    plain.backward(model, given.loss, *given.batches[0])
    assert plain.off(plain.gradients(pipe.model), plain.gradients(model)) < 1e-12


def test_building_a_pipeline_leaves_batch_norm_alone():
    """Elsewhere shapes were found by a real forward on uninitialised memory: averages were spoilt at step one."""
    given = plain.case("conv")
    pipe = pipeline(given)
    for (name, found), wanted in zip(pipe.model.named_buffers(), given.model.buffers(), strict=True):
        assert torch.equal(found, wanted), name


def test_tied_weights_stay_one_weight():
    """Elsewhere they became two, and the loss drifted from the second step."""
    given = plain.case("gpt")
    losses, model = plain.trained(given)
    pipe = pipeline(given, optimizer=plain.adamw, stages=4)
    assert [step.loss for step in pipe.train(given.batches)] == pytest.approx(losses, rel=1e-12)
    assert pipe.model.head.weight is pipe.model.tokens.weight
    assert sum(len(group["params"]) for o in pipe.optimizers.optimizers.values() for group in o.param_groups) == len(
        list(model.parameters())
    )


def test_what_waits_in_1f1b_is_what_1f1b_needs():
    """Elsewhere buffers for all m micro-batches stayed on every middle rank."""
    given = plain.case("gpt", rows=16)
    pipe = pipeline(given, stages=4, microbatches=16)
    most = [0] * 4

    class Most(Observer):
        def before(self, row):
            most[row.stage] = max(most[row.stage], len(pipe.stages[row.stage].kept))

    pipe.observers.add(Most())
    pipe.step(*given.batches[0])
    assert most == [4, 3, 2, 1]


class Asleep(torch.nn.Module):
    """Hands on what it is given until somebody wakes it: nobody draws, and no mode or flag of an open module tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.awake = torch.nn.Linear(6, 6), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) if self.awake else x


def test_a_layer_that_was_the_identity_on_the_trace_is_none_later():
    """Its result was taken for what it had been given, which later stages had from somebody else: the layer's own was
    lost, and so was its gradient."""
    given = plain.case("mlp")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 6), Asleep(), torch.nn.Linear(6, 6), Asleep(), torch.nn.Linear(6, 6)]
    model = torch.nn.Sequential(*layers).to(torch.float64)
    case = plain.Case(model, given.loss, given.batches)
    pipe, whole = pipeline(case, cuts=["1", "2", "4"], stages=4, verify=False), case.fresh()
    for step, (x, y) in enumerate(given.batches[:3]):
        for one in (pipe.model, whole):
            one.zero_grad()
            one[1].awake[:] = one[3].awake[:] = [True] * step
        pipe.step(x, y)
        plain.backward(whole, given.loss, x, y)
        assert plain.off(plain.gradients(pipe.model), plain.gradients(whole)) < 1e-12
