"""A model with fake weights, which have a shape, a type and a device, but no memory.

Inputs and buffers stay real, so that code that reads them (masks, positions) gets numbers; results computed from a fake
weight are fake. So a forward and a backward of a model of any size cost only their Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# The device of fakes, on which autocast and the choice of attention kernels depend. A fake tensor on a kind of device
# that torch was built without would crash the process.
HOME = torch.device("cpu")


@contextmanager
def faked(model: nn.Module, home: torch.device = HOME) -> Iterator[FakeTensorMode]:
    """Replace every parameter of the model by a fake meanwhile; tied ones stay tied. Buffers without memory become
    fakes, others are moved to `home`."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with replaced(model, lambda tensor: fake(mode, tensor, home), home):
        yield mode


@contextmanager
def replaced(model: nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor], home: torch.device) -> Iterator[None]:
    """Replace every parameter meanwhile, and every buffer without memory; other buffers are moved to `home`."""
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
    """Whether a tensor is fake: without memory, though not a meta tensor."""
    return isinstance(tensor, FakeTensor)
