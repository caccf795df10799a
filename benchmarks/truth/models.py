"""The models, each with a batch and an optimizer: penstock's own GPT, a residual network of convolutions, a Mixer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.app.config.data import TextData, built_in_text
from penstock.models.gpt import GPT

CLASSES = 10
LENGTH = 64  # of a text
RATE = 1e-5


@dataclass(frozen=True)
class Subject:
    """What is trained, the same in every process."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    optimizer: Callable[..., torch.optim.Optimizer]
    microbatches: int = 8

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    @cached_property
    def example(self) -> tuple[Tensor, Tensor]:
        """A micro-batch."""
        inputs, target = self.batch()
        rows = len(inputs) // self.microbatches
        return inputs[:rows], target[:rows]


def cross_entropy(result: Tensor, target: Tensor) -> Tensor:
    """Scores of classes in the last dimension, for one target a row or one a token."""
    return F.cross_entropy(result.flatten(0, -2), target.flatten())


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


def gpt() -> nn.Module:
    return GPT(vocab=len(set(built_in_text())), width=192, heads=4, layers=8, length=LENGTH)


def text() -> tuple[Tensor, Tensor]:
    return TextData(built_in_text(), 32, LENGTH).batch(0)


def images(rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Noise, with labels to match."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, size, size, generator=draw), torch.randint(0, CLASSES, (rows,), generator=draw)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


MODELS = {
    "gpt": Subject(gpt, text, adamw),
    "resnet": Subject(lambda: resnet(channels=48, blocks=8), lambda: images(64, 16), momentum),
    "mixer": Subject(lambda: Mixer(size=32, patch=4, width=192, blocks=8), lambda: images(32, 32), adamw),
    "tiny": Subject(lambda: resnet(channels=4, blocks=4), lambda: images(8, 8), momentum, microbatches=4),
}
