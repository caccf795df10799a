"""A model and batches of one's own, named in own.toml."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def make_model(width: int, layers: int) -> nn.Module:
    middle = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
    return nn.Sequential(nn.Linear(8, width), *middle, nn.Linear(width, 1))


def held_out(rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A few batches that no training sees: what it is scored on at the end."""
    return _drawn(rows, count=8, seed=1)


def make_batches(rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same on every worker: drawn from a seed."""
    return _drawn(rows, count=1000, seed=0)


def _drawn(rows: int, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(rows, 8, generator=source)
        yield x, (x[:, :1] * x[:, 1:2]).sin() + 0.5 * x[:, 2:3]
