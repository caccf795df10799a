"""Inputs that require grad get the gradient of the mean loss, whatever the backward started from."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock import InputError, Pipeline

torch.set_num_threads(1)


def summed(out, target):
    return (out - target).square().sum(), float(out.numel())


@pytest.mark.parametrize("loss", [F.mse_loss, summed])
def test_the_gradient_of_an_input_is_that_of_plain_training(loss):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    alone, y = copy.deepcopy(model), torch.randn(8, 6).double()
    x = torch.randn(8, 6).double().requires_grad_()
    z = x.detach().clone().requires_grad_()
    pipe = Pipeline(model, example=x.detach()[:2], stages=2, microbatches=4, loss=loss)
    for _ in range(2):  # the second on top of the first
        pipe.step(x, y)
        F.mse_loss(alone(z), y).backward()
    assert torch.allclose(x.grad, z.grad, rtol=1e-12)


def test_a_failed_step_leaves_an_inputs_gradient_as_it_was():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    x = torch.randn(8, 6, requires_grad=True)
    x.grad = torch.ones(8, 6)
    pipe = Pipeline(model, example=x.detach()[:2], stages=2, microbatches=4, loss=lambda out, y: out.sum() * y.mean())
    with pytest.raises(InputError, match="finite loss"):
        pipe.step(x, torch.full((8,), torch.nan))
    assert torch.equal(x.grad, torch.ones(8, 6))


def test_an_input_with_a_history_is_refused():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    pipe = Pipeline(model, example=torch.randn(2, 6), stages=2, microbatches=4, loss=F.mse_loss)
    with pytest.raises(InputError, match="without a history"):
        pipe.step(nn.Linear(6, 6)(torch.randn(8, 6)), torch.randn(8, 6))
