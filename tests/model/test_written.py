"""A forward that writes to weights: making a pipeline shows no trace of it, and what would go wrong is refused."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from compare import PARTS, assert_same, pipeline, plain, stepped
from torch import nn
from zoo import WIDTH, floats

from penstock import SplitError

torch.set_num_threads(1)


class Average(nn.Module):
    """Beside a layer that learns, one that follows it slowly: as encoders of keys do."""

    def __init__(self, graphed=False, by_data=False):
        super().__init__()
        self.layer, self.slow = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.slow.requires_grad_(False)
        self.graphed, self.by_data = graphed, by_data

    def forward(self, x):
        with torch.no_grad():
            if self.by_data:
                self.slow.weight.data = self.slow.weight.data * 0.9 + self.layer.weight.data * 0.1  # DATA
            else:
                self.slow.weight.mul_(0.9).add_(self.layer.weight, alpha=0.1)  # PLACE
            slow = self.slow(x.detach())
        return torch.tanh(self.layer(x)) - (self.slow(x) if self.graphed else slow)


def line_of(mark):
    lines, first = inspect.getsourcelines(Average)
    return f"{__file__}:{first + next(at for at, line in enumerate(lines) if mark in line)}"


def stack(*args, count=4):
    torch.manual_seed(5)
    return nn.Sequential(*(Average(*args) for _ in range(count)))


def kept(model):
    return copy.deepcopy(model.state_dict())


def unchanged(model, before):
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("method", ["1f1b", "gpipe", "zb-h1"])
def test_an_average_of_weights_moves_once_a_micro_batch_and_not_before(by_data, method):
    model = stack(False, by_data)
    before, memory = kept(model), model[0].slow.weight.data_ptr()
    pipe = pipeline(model, floats(4, WIDTH), stages=2, schedule=method)
    assert unchanged(model, before)
    assert model[0].slow.weight.data_ptr() == memory
    x = floats(7, WIDTH)
    wanted = plain(model, x, parts=PARTS)
    assert_same(stepped(pipe, x), wanted)
    whole = stack(False, by_data)
    for _ in range(PARTS):
        whole(x)
    assert torch.equal(model[3].slow.weight, whole[3].slow.weight)


@pytest.mark.parametrize(("by_data", "mark"), [(False, "PLACE"), (True, "DATA")])
def test_weights_that_a_backward_needs_must_stay_until_it_comes(by_data, mark):
    model = stack(True, by_data)
    before = kept(model)
    with pytest.raises(SplitError, match="weights alone which a backward needs") as caught:
        pipeline(model, floats(4, WIDTH), stages=2)
    assert f"'1.slow.weight' changed at {line_of(mark)}" in str(caught.value)  # the first has nothing to hand back
    assert unchanged(model, before)


def test_nor_can_it_be_done_twice():
    model = stack()
    before = kept(model)
    with pytest.raises(SplitError, match=r"recompute='never' for a forward that changes.*'0.slow.weight'"):
        pipeline(model, floats(4, WIDTH), stages=2, recompute="always")
    assert unchanged(model, before)


def test_nor_by_code_that_every_stage_runs():
    class Open(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                layer.bias.data.clamp_(-0.01, 0.01)
                x = layer(x)
            return x

    model = Open()
    before = kept(model)
    with pytest.raises(SplitError, match=r"no weight changed by code that a cut goes through.*'layers.0.bias' at "):
        pipeline(model, floats(4, WIDTH), stages=2)
    assert unchanged(model, before)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_an_embedding_that_bounds_its_rows(recompute):
    torch.manual_seed(5)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(11, WIDTH, max_norm=0.5, dtype=torch.float64), *layers)
    before = kept(model)
    pipe = pipeline(model, torch.arange(4), stages=2, recompute=recompute)
    assert unchanged(model, before)
    x = torch.arange(7)
    wanted = plain(model, x)
    assert_same(stepped(pipe, x), wanted)
    assert float(model[0].weight[:7].norm(dim=1).max().detach()) < 0.51
