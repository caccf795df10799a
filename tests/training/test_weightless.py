"""A weightless model in one process: filled by `load`, or by its layers themselves, it trains like any other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plain
from distributed import brought
from penstock import Pipeline
from penstock.model.materialise import weightless

torch.set_num_threads(1)


@pytest.mark.parametrize("by", ["function", "file"])
def test_it_trains_as_the_model_does_whose_weights_it_was_given(by, tmp_path):
    given = plain.case("gpt")
    Pipeline(given.fresh(), example=given.example, stages=2).export(tmp_path / "w.safetensors")
    losses, wanted = plain.trained(given)
    with weightless():
        model = plain.GPT().to(torch.float64)
    pipe = Pipeline(
        model, example=given.example, stages=4, loss=given.loss, optimizer=plain.adamw,
        load=given.model.state_dict().__getitem__ if by == "function" else tmp_path / "w.safetensors",
    )  # fmt: skip
    assert model.head.weight is model.tokens.weight
    assert [step.loss for step in pipe.train(given.batches)] == pytest.approx(losses, rel=1e-12)
    assert plain.off(plain.weights(model), plain.weights(wanted)) < 1e-10


def test_buffers_on_the_meta_device_are_loaded_too():
    torch.manual_seed(2)
    model = brought.normed(2)
    images, target = (torch.randn(8, 2, 4, 4, dtype=torch.float64) for _ in range(2))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        parts = [F.mse_loss(model(images[at : at + 4]), target[at : at + 4]) / 2 for at in (0, 4)]
        losses.append(sum(parts).item())
        sum(parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept, bare = brought.weightless(2)
    assert kept["losses"] == bare["losses"] == pytest.approx(losses, rel=1e-12)
    for name, value in model.named_parameters():
        assert kept["state"][name] == bare["state"][name]
        assert torch.allclose(torch.tensor(bare["state"][name], dtype=torch.float64), value, rtol=0, atol=1e-12), name
    for loaded, built in zip(bare["state"]["0.1.running_mean"], kept["state"]["0.1.running_mean"], strict=True):
        assert loaded - built == pytest.approx(7.0 * 0.9**2)  # two steps on from where each began: 7, and 0


def test_without_load_the_layers_initialise_themselves():
    with weightless():
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    torch.manual_seed(0)
    pipe = Pipeline(model, example=torch.ones(2, 4), stages=2, microbatches=2, loss=F.mse_loss)
    torch.manual_seed(0)
    wanted = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for (name, mine), other in zip(pipe.model.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(mine, other), name
