"""A model's gradients by one plain backward, and by input gradient first and weight gradients later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.model.split_backward import WeightQueue, deferring


@dataclass
class Found:
    outputs: list[Tensor]
    inputs: list[Tensor | None]  # gradients
    weights: dict[str, Tensor | None]  # gradients, by name
    early: set[str]  # parameters that had a gradient before the weight gradients ran
    held: int = 0


def device() -> str:
    """Where the tests run: `pytest --device cuda` changes it."""
    return torch.get_default_device().type


def leaves(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]


def outputs_of(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for t in result if isinstance(t, Tensor) and t.requires_grad]


def gradients_for(outputs: list[Tensor]) -> list[Tensor]:
    """Fixed numbers, so that two runs are told the same."""
    source = torch.Generator("cpu").manual_seed(7)
    return [torch.randn(t.shape, generator=source, dtype=torch.float64, device="cpu").to(t) for t in outputs]


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def plain(model: nn.Module, inputs: tuple[Tensor, ...], around: Callable = nullcontext) -> Found:
    model.zero_grad()
    torch.manual_seed(3)
    given = leaves(inputs)
    with around():
        outputs = outputs_of(model(*given))
    torch.autograd.backward(outputs, gradients_for(outputs))
    return Found(outputs, [t.grad for t in given], gradients_of(model), set())


def halves(model: nn.Module, inputs: tuple[Tensor, ...], around: Callable = nullcontext) -> Found:
    model.zero_grad()
    torch.manual_seed(3)
    given = leaves(inputs)
    queue = WeightQueue()
    with deferring(queue), around():
        outputs = outputs_of(model(*given))
    with deferring(queue):
        torch.autograd.backward(outputs, gradients_for(outputs))
    early = {name for name, p in model.named_parameters() if p.grad is not None}
    found = [None if t.grad is None else t.grad.clone() for t in given]
    held = queue.held_bytes
    queue.run()
    assert queue.waiting == queue.held_bytes == 0
    for now, then in zip(given, found, strict=True):  # W changes nothing that I has found
        assert (now.grad is None) == (then is None)
        assert then is None or torch.equal(now.grad, then)
    return Found(outputs, found, gradients_of(model), early, held)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal bits; on a GPU, whose libraries choose their order of summation, equal but for rounding."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.stride() != other.stride():
        return False
    if one.device.type == "cpu":
        return torch.equal(one, other)
    precision = torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=100 * precision, atol=100 * precision)


def check(
    model: nn.Module, inputs: tuple[Tensor, ...], early: set[str] | None, around: Callable = nullcontext
) -> Found:
    """Equal bits everywhere; `early` names the parameters that get their gradient in I (None: whatever)."""
    expected, found = plain(model, inputs, around), halves(model, inputs, around)
    assert all(map(same, expected.outputs, found.outputs)), "outputs"
    assert [same(a, b) for a, b in zip(expected.inputs, found.inputs, strict=True)] == [True] * len(inputs), "inputs"
    assert {n for n, g in expected.weights.items() if not same(g, found.weights[n])} == set(), "weights"
    if early is not None:
        assert found.early == early
    return found
