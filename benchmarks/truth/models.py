"""Two models beside penstock's own GPT: a residual network of convolutions, and an MLP-Mixer. With data for them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.one(x)))
        return F.relu(x + self.norms[1](self.two(inner)))


def resnet(channels: int, blocks: int) -> nn.Module:
    entry = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
    return nn.Sequential(entry, *(Residual(channels) for _ in range(blocks)), head)


class Mixing(nn.Module):
    """Over patches, then over channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches(self.before(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.between(x))


class Mixer(nn.Module):
    def __init__(self, size: int, patch: int, width: int, blocks: int) -> None:
        super().__init__()
        self.entry = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.ModuleList(Mixing((size // patch) ** 2, width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def images(rows: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Noise, with labels to match."""
    draw = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(rows, 3, size, size, generator=draw), torch.randint(0, CLASSES, (rows,), generator=draw)
