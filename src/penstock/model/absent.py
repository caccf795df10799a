"""Tracing a model whose weights are not here: on a rank that has one stage's, or before any were made.

Inputs and buffers are real, so code that looks at them, at a mask or at lengths, decides as it will in training.
Weights are fakes: they have a shape and a type and hold nothing, and whatever meets them becomes fake. A block that
decides inside by what its weights make of the data, as some mixtures of experts do, needs numbers to decide by: then
every weight is one row of small numbers under the shape of the whole, which takes no memory either. What such a block
decides is its own business and no part of the path; decisions between blocks that depend on weights are refused anyway.
The weights of the block that runs are written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from penstock.errors import SplitError
from penstock.model.fakes import faked, replaced

T = TypeVar("T")


def without_weights(model: nn.Module, home: torch.device, find: Callable[[], T]) -> T:
    """Run something that runs the model, with stand-ins for all of its weights. `home` is where its inputs are."""
    try:
        with faked(model, home):
            return find()
    except SplitError:
        raise
    except Exception:  # fakes know no data, nor all kernels: whatever asked for more said so in its own words
        with _repeated_rows(model, home):
            return find()


@contextmanager
def written_out(module: nn.Module) -> Iterator[None]:
    """A module whose weights are repeated rows has them written out in full meanwhile: some kernels want that."""
    places = [(held, name, p) for held in (m._parameters for m in module.modules()) for name, p in held.items()]
    known: dict[int, nn.Parameter] = {}
    for held, name, parameter in places:
        if parameter is not None and not parameter.is_contiguous():
            if id(parameter) not in known:
                dense = parameter.detach().contiguous()
                known[id(parameter)] = nn.Parameter(dense, requires_grad=parameter.requires_grad)
            held[name] = known[id(parameter)]
    try:
        yield
    finally:
        for held, name, parameter in places:
            held[name] = parameter


@contextmanager
def _repeated_rows(model: nn.Module, home: torch.device) -> Iterator[None]:
    source = torch.Generator(device="cpu").manual_seed(0)

    def row(tensor: torch.Tensor) -> torch.Tensor:
        """The same on every rank, and of the size that layers are initialised with."""
        width = max(tensor.shape[-1] if tensor.dim() else 1, 1)
        small = torch.randn(width, generator=source, device="cpu") / width**0.5
        plain = small.to(tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.float32)
        there: torch.Tensor = plain.to(dtype=tensor.dtype, device=home)
        return there[0] if tensor.dim() == 0 else there.expand(tensor.shape)

    with replaced(model, row, home):
        yield
