"""Bytes of a profile against sizes that are known: what layers send, keep, own and have their optimizer keep."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import penstock

ROWS, FLOAT = 5, 4
SIZES = (8, 16, 12, 4)


def loss(result, _):
    return result.square().mean()


def linears():
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(SIZES)))


def profiled(model, example, optimizer=None, **options):
    return penstock.profile(model, example, loss=loss, optimizer=optimizer, repetitions=1, microbatches=1, **options)


@pytest.fixture(scope="module")
def chain():
    return profiled(linears(), torch.randn(ROWS, SIZES[0]), torch.optim.AdamW)


@pytest.mark.parametrize("at", range(3))
def test_linear_layers(chain, at):
    layer, (a, b) = chain.layers[at], SIZES[at : at + 2]
    last = at == 2
    assert layer.name == str(at)
    assert layer.parameter_bytes == (a * b + b) * FLOAT
    assert layer.optimizer_bytes == 2 * layer.parameter_bytes + 2 * FLOAT  # two averages, and each tensor's count
    assert layer.output_bytes == (0 if last else ROWS * b * FLOAT)
    # its input; of the loss, the result that is squared
    assert layer.kept_bytes == ROWS * (a + (b if last else 0)) * FLOAT
    assert layer.kept_until_weight_bytes == ROWS * (a + b) * FLOAT  # its input and its output's gradient


def test_edges_and_rows(chain):
    assert chain.edges == ((0, 1), (1, 2))
    assert chain.samples == ROWS
    assert [(one.source, one.readers, one.bytes) for one in chain.sent] == [
        (0, (1,), ROWS * SIZES[1] * FLOAT),
        (1, (2,), ROWS * SIZES[2] * FLOAT),
    ]


@pytest.mark.parametrize(
    ("optimizer", "times"),
    [(lambda p: torch.optim.SGD(p, lr=0.1), 0), (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1), (None, 0)],
)
def test_state_of_other_optimizers(optimizer, times):
    found = profiled(linears(), torch.randn(ROWS, SIZES[0]), optimizer)
    assert [layer.optimizer_bytes for layer in found.layers] == [
        times * layer.parameter_bytes for layer in found.layers
    ]
    spent = sum(layer.update for layer in found.layers) + found.per_stage.update
    assert spent == 0 if optimizer is None else spent > 0


def test_an_optimizer_by_names_is_given_the_models():
    seen = []

    def by_name(names, params):
        seen.append(names)
        return torch.optim.SGD(params, lr=0.1)

    profiled(linears(), torch.randn(ROWS, SIZES[0]), by_name)
    assert ["0.weight", "0.bias"] in seen
    assert ["2.weight", "2.bias"] in seen


def test_buffers_are_counted_and_layers_without_weights_too():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    found = profiled(model, torch.randn(ROWS, 8))
    assert [layer.buffer_bytes for layer in found.layers] == [0, 2 * 8 * FLOAT + 8, 0]


class Skipping(nn.Module):
    """The first layer gives two tensors: one for the next, one for the last."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 12), nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, x):
        near, far = (part.contiguous() for part in self.first(x).split((4, 8), dim=1))
        return self.third(self.second(near)) + far


def test_two_tensors_that_go_two_ways():
    found = profiled(Skipping(), torch.randn(ROWS, 4))
    assert found.crossing((1, 2)) == {(0, 1): ROWS * 4 * FLOAT, (0, 2): ROWS * 8 * FLOAT, (1, 2): ROWS * 4 * FLOAT}
    assert found.crossing((2,)) == {(0, 1): ROWS * 12 * FLOAT}
    assert found.leaving((2,)) == [ROWS * 12 * FLOAT, 0]
    assert penstock.Profile.from_json(found.to_json()) == found
