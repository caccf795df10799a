"""A model with a fault that only a pipeline shows: its backward looks at what the forward has last left behind."""

from __future__ import annotations

from itertools import islice

import torch
from torch import nn


class Careless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.module.seen * gradient, None  # of the last forward, whichever micro-batch that was


class Square(nn.Module):
    def forward(self, x):
        self.seen = x.detach()
        return Careless.apply(x, self)


def make_model(careless):
    def block(index):
        return nn.Sequential(nn.Linear(8, 8), Square() if careless and index == 0 else nn.Tanh())

    return nn.Sequential(*(block(index) for index in range(4)), nn.Linear(8, 8))


calls = 0


def drifting(result, target):
    """A loss that tells more each time it is trained by; its gradients are as they should be."""
    global calls
    calls += torch.is_grad_enabled()
    return nn.functional.mse_loss(result, target) + calls


def make_batches():
    source = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(8, 8, generator=source), torch.randn(8, 8, generator=source)


def some_batches():
    """That end, the last one with fewer rows."""
    *whole, (inputs, target) = islice(make_batches(), 3)
    return [*whole, (inputs[:5], target[:5])]


def no_batches():
    return []
