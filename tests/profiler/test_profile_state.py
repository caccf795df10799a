"""A model that is profiled is left bit for bit as it was: weights, gradients, buffers, optimizer and random states."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock


class Counting(nn.Module):
    """Keeps a count and draws numbers from every source there is."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            self.mean.add_(x.mean(0))
        return x * (1 + 0.01 * random.random()) + 0.01 * float(np.random.rand())


def make():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), Counting(), nn.Dropout(0.4), nn.Linear(8, 8),
        nn.BatchNorm1d(8), nn.Linear(8, 3),
    )  # fmt: skip


def batch(number, rows=6):
    source = torch.Generator().manual_seed(number)
    home = torch.get_default_device()
    rows_of = torch.randn(rows, 8, generator=source, device="cpu"), torch.arange(rows) % 3
    return tuple(tensor.to(home) for tensor in rows_of)


def train(model, optimizer, numbers):
    for number in numbers:
        inputs, target = batch(number)
        F.cross_entropy(model(inputs), target).backward()
        if number % 2:  # every other batch's gradients stay for the next
            optimizer.step()
            optimizer.zero_grad()


def seeded():
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)


def everything(model, optimizer):
    """All that training goes on from, by value."""
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    chance = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    modes = [(m.training, getattr(m, "calls", None), getattr(m, "track_running_stats", None)) for m in model.modules()]
    return copy.deepcopy((model.state_dict(), grads, optimizer.state_dict(), hooks, chance, cuda, modes))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def begun():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seeded()
    train(model, optimizer, range(1, 5))  # the last one's gradients are left
    return model, optimizer


def profiled(model, loss=F.cross_entropy, **options):
    inputs, target = batch(99)
    given = {"optimizer": lambda params: torch.optim.AdamW(params), "repetitions": 1, "microbatches": 2, **options}
    return penstock.profile(model, inputs, target=target, loss=loss, **given)


def test_nothing_of_the_model_has_changed():
    model, optimizer = begun()
    before, held = everything(model, optimizer), [p.grad for p in model.parameters()]
    profiled(model)
    assert same(before, everything(model, optimizer))
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), held, strict=True))


def test_training_goes_on_as_if_nothing_had_been():
    plain, optimizer = begun()
    train(plain, optimizer, range(5, 9))
    model, own = begun()
    profiled(model)
    train(model, own, range(5, 9))
    assert same(everything(plain, optimizer), everything(model, own))


@pytest.mark.parametrize("calls", [1, 4, 9])
def test_nothing_has_changed_when_the_loss_fails(calls):
    left = [calls]

    def failing(result, target):
        left[0] -= 1
        if not left[0]:
            raise KeyError("not today")
        return F.cross_entropy(result, target)

    model, optimizer = begun()
    before = everything(model, optimizer)
    with pytest.raises(KeyError, match="not today"):
        profiled(model, failing)
    assert same(before, everything(model, optimizer))


def test_nothing_has_changed_when_the_optimizer_fails():
    def failing(params):
        raise ValueError("no such optimizer")

    model, optimizer = begun()
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match="no such optimizer"):
        profiled(model, optimizer=failing)
    assert same(before, everything(model, optimizer))


def test_threads_are_as_before():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        profiled(make(), optimizer=None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
