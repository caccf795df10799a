"""Trace a model without its weights: on a rank that holds one stage's, or before any are created.

Inputs and buffers are real, so code that branches on them, on a mask or on lengths, decides as in training. Weights are
fakes: they have a shape and a type but no memory, and every result computed from them is fake. A block that branches on
results of its weights, as some mixtures of experts do, needs numbers: then every weight is one row of small numbers,
expanded to its shape, which takes no memory either. Decisions within a block are not part of the path; decisions
between blocks that depend on weights are refused anyway. The weights of the running block are made contiguous.
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
    """Call a function that runs the model with stand-ins for all its weights. `home` is the device of its inputs."""
    try:
        with faked(model, home):
            return find()
    except SplitError:
        raise
    except Exception:  # fakes have no data, and not all kernels support them: the error may be of any type
        with _repeated_rows(model, home):
            return find()


@contextmanager
def written_out(module: nn.Module) -> Iterator[None]:
    """Make the expanded weights of a module contiguous meanwhile, as some kernels require it."""
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
        """Return the same values on every rank, of the magnitude of an initialised layer."""
        width = max(tensor.shape[-1] if tensor.dim() else 1, 1)
        small = torch.randn(width, generator=source, device="cpu") / width**0.5
        plain = small.to(tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.float32)
        there: torch.Tensor = plain.to(dtype=tensor.dtype, device=home)
        return there[0] if tensor.dim() == 0 else there.expand(tensor.shape)

    with replaced(model, row, home):
        yield
