"""Models with a fault that only a pipeline shows: a backward that looks at what the forward has last left behind, and a
layer that fails on a rank."""

from __future__ import annotations

import os
import signal
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


class Unlucky(nn.Module):
    """Fails, or ends its process, at a training forward on a rank: where losses and weights were fine before."""

    def __init__(self, how, call):
        super().__init__()
        self.how, self.left = how, call

    def forward(self, x):
        if self.training and torch.is_grad_enabled() and os.environ.get("WORLD_SIZE") == "2":
            self.left -= 1
        if self.left == 0 and self.how == "raise":
            raise ValueError("no such luck")
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def make_unlucky(how, call):
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Sequential(nn.Linear(8, 8), Unlucky(how, call)))


def some_batches():
    """That end, the last one with fewer rows."""
    *whole, (inputs, target) = islice(make_batches(), 3)
    return [*whole, (inputs[:5], target[:5])]


def no_batches():
    return []
