"""Batch norm: each micro-batch has its own statistics, running averages move once a step by the whole batch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plain
from penstock import InputError, Pipeline

torch.set_num_threads(1)
F64 = torch.float64


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def whole_batch_averages(model: nn.Module, x: torch.Tensor, parts: int) -> None:
    """The reference: inputs of every norm over all micro-batches, put together; then torch's own rule."""
    seen: dict[nn.Module, list[torch.Tensor]] = {}
    handles = [
        n.register_forward_pre_hook(lambda n, args: seen.setdefault(n, []).append(args[0])) for n in norms(model)
    ]
    before = buffers(model)
    with torch.no_grad():
        for part in plain.parts_of(x, parts):
            model(part)
    for handle in handles:
        handle.remove()
    model.load_state_dict(before, strict=False)
    with torch.no_grad():
        for norm, given in seen.items():
            norm(torch.cat(given))


def pipeline(given: plain.Case, **options) -> Pipeline:
    options = {"stages": 2, "microbatches": 4, "loss": given.loss} | options
    return Pipeline(given.fresh(), example=given.example, **options)


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
@pytest.mark.parametrize("rows", [8, 11])
def test_running_averages_are_the_whole_batchs_and_unbiased(momentum, recompute, rows):
    given = plain.case("conv", rows=rows, steps=3)
    for norm in norms(given.model):
        norm.momentum = momentum
    model, pipe = given.fresh(), pipeline(given, recompute=recompute)
    for x, y in given.batches:
        whole_batch_averages(model, x, 4)
        pipe.step(x, y)
    found, wanted = buffers(pipe.model), buffers(model)
    assert plain.off(found, wanted) < 1e-12
    assert {int(b) for name, b in found.items() if name.endswith("tracked")} == {3}


def test_float32_averages_do_not_cancel():
    """A large mean with a small variance: the sum of squares minus the square of the sum would lose it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    x = 1000 + torch.randn(64, 3) * 0.1
    pipe = Pipeline(model, example=x[:4], stages=2, microbatches=4, loss=lambda out, _: out.square().mean())
    pipe.step(x)
    unbiased = x.double().var(0)
    assert plain.off({"": model[0].running_var.double()}, {"": 0.9 + 0.1 * unbiased}) < 1e-5


def test_gradients_do_not_depend_on_recompute():
    given = plain.case("conv")
    found = []
    for recompute in ("never", "always"):
        pipe = pipeline(given, recompute=recompute)
        pipe.step(*given.batches[0])
        found.append(plain.gradients(pipe.model))
    assert plain.off(found[1], found[0]) <= plain.BITS


def test_eval_and_forward_in_eval_mode_leave_averages_alone():
    given = plain.case("conv")
    pipe = pipeline(given)
    pipe.step(*given.batches[0])
    before = buffers(pipe.model)
    pipe.evaluate(given.batches)
    pipe.model.eval()
    pipe.forward(given.batches[1][0])
    assert plain.off(buffers(pipe.model), before) <= plain.BITS


def test_a_norm_that_was_put_into_eval_mode_stays_there_and_its_averages_too():
    given = plain.case("conv")
    pipe = pipeline(given)
    frozen = norms(pipe.model)[2].eval()
    before = frozen.running_mean.clone()
    pipe.step(*given.batches[0])
    pipe.evaluate(given.batches[:1])
    assert not frozen.training
    assert pipe.model.training
    pipe.step(*given.batches[1])
    assert torch.equal(frozen.running_mean, before)
    model = given.fresh()
    norms(model)[2].eval()
    plain.backward(model, given.loss, *given.batches[0], 4)
    again = pipeline(given)
    norms(again.model)[2].eval()
    again.step(*given.batches[0])
    assert plain.off(plain.gradients(again.model), plain.gradients(model)) < 1e-12


def test_a_step_that_fails_does_not_move_them():
    given = plain.case("conv")
    pipe = pipeline(given)
    pipe.step(*given.batches[0])
    before = buffers(pipe.model)
    broken = given.batches[1][0].clone()
    broken[-1] = float("nan")
    with pytest.raises(InputError, match="finite loss"):
        pipe.step(broken, given.batches[1][1])
    assert plain.off(buffers(pipe.model), before) <= plain.BITS
    assert all(norm.track_running_stats and not norm._forward_pre_hooks for norm in norms(pipe.model))


class Counting(nn.Module):
    """A layer with a buffer of its own that every training forward changes, and whose result depends on it."""

    def __init__(self, assigned: bool) -> None:
        super().__init__()
        self.assigned, self.layer = assigned, nn.Linear(6, 6)
        self.register_buffer("seen", torch.ones((), dtype=F64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            if self.assigned:
                self.seen = self.seen + 1
            else:
                self.seen += 1
        return torch.tanh(self.layer(x)) * self.seen.detach().clone()


@pytest.mark.parametrize("assigned", [False, True])
def test_other_buffers_change_once_a_micro_batch_also_with_recompute(assigned):
    torch.manual_seed(5)
    model = nn.Sequential(*(Counting(assigned) for _ in range(4))).to(F64)
    given = plain.Case(model, nn.functional.mse_loss, plain.case("mlp").batches)
    found = []
    for recompute in ("never", "always"):
        pipe = pipeline(given, recompute=recompute)
        for batch in given.batches[:3]:
            pipe.step(*batch)
        assert {float(b) for b in pipe.model.buffers()} == {1.0 + 3 * 4}
        found.append(plain.gradients(pipe.model))
    assert plain.off(found[1], found[0]) <= plain.BITS


def test_other_buffers_are_put_back_when_a_step_fails():
    torch.manual_seed(5)
    model = nn.Sequential(*(Counting(False) for _ in range(4))).to(F64)
    given = plain.Case(model, nn.functional.mse_loss, plain.case("mlp").batches)
    pipe = pipeline(given)
    for _ in range(2):  # before anything is known of its buffers, and after
        before = buffers(pipe.model)
        with pytest.raises(InputError, match="finite loss"):
            pipe.step(given.batches[0][0] * float("nan"), given.batches[0][1])
        assert plain.off(buffers(pipe.model), before) <= plain.BITS
        pipe.step(*given.batches[0])
