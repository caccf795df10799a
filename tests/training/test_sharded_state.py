"""Where state cannot be divided between replicas, one message says so; in one process there is nothing to divide."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import InputError
from penstock.training.optimizers import Muon

GIVEN = {"stages": 2, "replicas": 2, "shard": "optimizer", "optimizer": lambda p: torch.optim.AdamW(p, lr=0.1)}


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))


def pipeline(**changed) -> penstock.Pipeline:
    asked = {name: value for name, value in (GIVEN | changed).items() if value is not None}
    return penstock.Pipeline(layers(), example=torch.ones(4, 3), loss=lambda out, _: out.square().mean(), **asked)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shard": "weights"}, ["shard to be 'optimizer' or 'gradients'", "'weights'"]),
        ({"shard": 1}, ["shard to be", "1"]),
        ({"replicas": None}, ["stages of several replicas where shard divides state", "one replica each"]),
        (
            {"schedule": "pipedream", "replicas": None},
            ["a schedule with a flush where shard divides", "pipedream, which"],
        ),
        ({"optimizer": None}, ["an optimizer, whose state is divided", "none"]),
        ({"offload": "weights"}, ["weights that stay on their device", "offload='weights'"]),
        ({"optimizer": lambda p: Muon(p, lr=0.1)}, ["treats every element alone", "Muon"]),
    ],
)
def test_refused(changed, words):
    with pytest.raises(InputError) as caught:
        pipeline(**changed)
    assert [word for word in words if word not in str(caught.value)] == []


def test_in_one_process_it_changes_no_bit():
    batches = [(torch.randn(8, 3), None) for _ in range(3)]
    plain, divided = pipeline(shard=None), pipeline()
    for pipe in (plain, divided):
        for inputs, _ in batches:
            pipe.step(inputs)
    state = divided.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
