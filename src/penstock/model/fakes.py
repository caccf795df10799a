"""A model with fake weights: they have a shape, a type and a device, and hold nothing.

Inputs and buffers stay what they are, so that code which looks at them (masks, positions) finds real numbers; whatever
meets a fake weight becomes fake. In this way a forward and a backward of a model of any size cost only their Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Where fakes pretend to be: autocast and the choice of attention kernels go by it. A fake tensor on a kind of device
# that torch was built without would end the process.
HOME = torch.device("cpu")


@contextmanager
def faked(model: nn.Module, home: torch.device = HOME) -> Iterator[FakeTensorMode]:
    """Every parameter of the model is a fake meanwhile, tied ones still the same; with or without weights. So is a
    buffer without memory; others are at home."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with replaced(model, lambda tensor: fake(mode, tensor, home), home):
        yield mode


@contextmanager
def replaced(model: nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor], home: torch.device) -> Iterator[None]:
    """Something else stands in for every parameter meanwhile, and for every buffer without memory; others are at
    home."""
    holders: list[dict[str, Any]] = [held for m in model.modules() for held in (m._parameters, m._buffers)]
    places = [(held, name, tensor) for held in holders for name, tensor in held.items() if tensor is not None]
    known: dict[int, torch.Tensor] = {}
    for held, name, tensor in places:
        if id(tensor) not in known:
            known[id(tensor)] = _replacement(tensor, stand_in, home)
        held[name] = known[id(tensor)]
    try:
        yield
    finally:
        for held, name, tensor in places:
            held[name] = tensor


def _replacement(
    tensor: torch.Tensor, stand_in: Callable[[torch.Tensor], torch.Tensor], home: torch.device
) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(stand_in(tensor), requires_grad=tensor.requires_grad)
    return stand_in(tensor) if tensor.is_meta else tensor.to(home)


def fake(mode: FakeTensorMode, like: torch.Tensor, home: torch.device = HOME) -> torch.Tensor:
    return FakeTensor(mode, torch.empty_like(like, device="meta", requires_grad=False), home)


def is_fake(tensor: torch.Tensor) -> bool:
    """A fake has no place in memory, though it does not call itself empty."""
    return isinstance(tensor, FakeTensor)
