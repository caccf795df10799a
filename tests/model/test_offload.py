"""Offload on a device of its own: what waits in host memory is not on the device."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import plain
from penstock import Pipeline

MIB = 2**20
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def peak(x: torch.Tensor, **options) -> tuple[float, float, dict[str, torch.Tensor]]:
    """MiB on the device between steps and at the most during one, over what was there; and the weights after three."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    pipe = Pipeline(
        deep(),
        example=x[:2],
        stages=4,
        schedule="gpipe",
        loss=lambda out, _: out.square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        **options,
    )
    pipe.step(x)
    torch.cuda.reset_peak_memory_stats()
    pipe.step(x)
    most = torch.cuda.max_memory_allocated()
    pipe.step(x)
    rests = torch.cuda.memory_allocated()
    weights = {name: weight.cpu() for name, weight in plain.weights(pipe.model).items()}
    return (rests - before) / MIB, (most - before) / MIB, weights


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.Tanh()) for _ in range(16))
    return nn.Sequential(*layers).cuda()


def test_weights_of_stages_that_wait_leave_the_device():
    x = torch.randn(8, 2048, device="cuda")  # 16 layers of 16 MiB
    rests, most, weights = peak(x)
    rests_off, most_off, weights_off = peak(x, offload="weights")
    assert rests > 255
    assert rests_off < 80  # one stage of four
    assert most_off < most - 150
    assert plain.off(weights_off, weights) == 0


def test_activations_that_wait_leave_the_device():
    x = torch.randn(4 * 2048, 2048, device="cuda")  # 16 MiB a micro-batch and layer, twice
    _, most, weights = peak(x)
    _, most_off, weights_off = peak(x, offload="activations")
    assert most_off < most - 900  # of 1024: what crosses between stages stays
    assert plain.off(weights_off, weights) == 0
