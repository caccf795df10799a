"""A loss that reads what modules keep on the side is refused: there lies what another micro-batch has left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock import Pipeline, SplitError

torch.set_num_threads(1)
LIST: list[torch.Tensor] = []


class Balanced(nn.Module):
    """Keeps a balance loss, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.layer, self.balance = nn.Linear(6, 6), 0.0

    def forward(self, x):
        x = torch.tanh(self.layer(x))
        self.balance = x.square().mean()
        LIST.append(self.balance)
        return x


@pytest.fixture
def model():
    LIST.clear()
    torch.manual_seed(1)
    return nn.Sequential(*(Balanced() for _ in range(4)))


def pipeline(model, loss, **options):
    return Pipeline(model, example=torch.zeros(2, 6), stages=2, loss=loss, **options)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("method", ["1f1b", "gpipe", "zb-h1"])
def test_an_attribute_of_another_stages_module(model, method, recompute):
    def loss(out, target):
        return F.mse_loss(out, target) + sum(module.balance for module in model)

    pipe = pipeline(model, loss, schedule=method, recompute=recompute)
    with pytest.raises(SplitError, match=r"one that reads 0.balance, which the forward of another stage sets; return"):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("method", ["1f1b", "gpipe", "zb-h1"])
def test_a_list_that_every_module_adds_to(model, method, recompute):
    def loss(out, target):
        kept = sum(LIST)
        LIST.clear()
        return F.mse_loss(out, target) + kept

    pipe = pipeline(model, loss, schedule=method, recompute=recompute)
    with pytest.raises(SplitError, match="into a graph from before: what a module has kept on the side; return"):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))


def test_what_the_last_stage_keeps_it_may_read(model):
    def loss(out, target):
        return F.mse_loss(out, target) + model[3].balance

    whole = nn.Sequential(*(Balanced() for _ in range(4)))
    whole.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    (F.mse_loss(whole(x), y) + whole[3].balance).backward()
    pipe = pipeline(model, loss)
    pipe.step(x, y)
    for found, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(found.grad, wanted.grad, atol=1e-6)
