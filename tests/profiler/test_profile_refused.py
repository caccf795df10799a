"""What cannot be measured gets one message; what cannot be cut is one layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock
from penstock import InputError
from penstock.model.materialise import weightless


def mean(result, _):
    return result.mean()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": None}, "a loss, from which backwards start, but got none; give loss="),
        ({"loss": 3}, "loss= to be a function, but got int"),
        ({"loss": lambda result, _: result}, r"a loss to be a scalar, but got shape \(2, 4\)"),
        ({"repetitions": 0}, "repetitions to be a whole number of at least 1, but got 0"),
        ({"threads": 1.5}, "threads to be a whole number of at least 1, but got 1.5"),
        ({"threads": 10**8}, "threads to be at most 1024, but got 100000000"),
        ({"microbatches": 0}, "microbatches to be a whole number of at least 1, but got 0"),
        ({"precision": "fp8"}, "precision to be bf16 or fp16, but got 'fp8'"),
        ({"optimizer": 3}, "optimizer= to be a function, but got int"),
        ({"optimizer": lambda params: None}, "optimizer= to make an optimizer, but got NoneType"),
        ({"target": torch.zeros(3, 1)}, r"the same number of rows, but got \[2, 3\]"),
    ],
)
def test_bad_input(options, words):
    given = {"loss": mean, "repetitions": 1, **options}
    with pytest.raises(InputError, match=words):
        penstock.profile(nn.Linear(4, 4), torch.randn(2, 4), **given)


def test_no_model_and_no_weights():
    with pytest.raises(InputError, match=r"an nn\.Module, but got 'model'"):
        penstock.profile("model", torch.randn(2, 4), loss=mean)
    with weightless():
        bare = nn.Linear(4, 4)
    with pytest.raises(InputError, match="a model with weights, as it is to run, but got a weightless one"):
        penstock.profile(bare, torch.randn(2, 4), loss=mean)


def test_a_model_that_cannot_be_cut_is_one_layer():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_forward_hook(lambda *_: None)
    found = penstock.profile(model, torch.randn(2, 4), loss=mean, repetitions=1)
    assert [layer.name for layer in found.layers] == ["Sequential"]
    assert found.layers[0].forward > 0
    assert found.layers[0].parameter_bytes == 3 * 20 * 4
    assert found.per_stage == type(found.per_stage)()
