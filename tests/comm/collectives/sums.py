"""The tensors of the tests of reductions, and their sums as one process adds them up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Spec = tuple[tuple[int, ...], str, str]  # shape, dtype, how it lies in memory


def made(spec: Spec, seed: int, rank: int) -> Tensor:
    """The tensor of a rank: the same in whatever process."""
    shape, name, lies = spec
    dice = torch.Generator().manual_seed(1000 * seed + rank)
    dtype: torch.dtype = getattr(torch, name)
    values = torch.randn(shape, generator=dice, dtype=torch.float64) * 10 ** (rank - 1)
    tensor = (100 * values).to(dtype) if not dtype.is_floating_point else values.to(dtype)
    if lies == "strided":
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if lies == "transposed" else tensor


def raw(tensor: Tensor) -> bytes:
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().flatten())
    return dense.view(torch.uint8).numpy().tobytes()


def total(spec: Spec, seed: int, ranks: Sequence[int]) -> bytes:
    """((r0 + r1) + r2) + ..."""
    first, *rest = (made(spec, seed, rank) for rank in ranks)
    for term in rest:
        first = first + term
    return raw(first)
