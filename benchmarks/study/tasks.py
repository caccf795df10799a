"""The two tasks: characters of the Python manual for a GPT, noisy handwritten digits for a residual network.

Both models are 16 residual pieces between an entry and a head (a GPT's block is two: attention and MLP), so that 4, 8
and 16 stages train the same model. No norm looks at more than one row, so a loss does not depend on how a mini-batch is
cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.app.config.data import TextData, built_in_text, digits
from penstock.models.gpt import GPT

PIECES = 16
ROWS = 32  # of a mini-batch
HELD_OUT = 8  # mini-batches of the final evaluation
NOISE = 0.5  # standard deviation added to pixels between 0 and 1: without it, digits are soon learned by heart
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    name: str
    title: str
    rates: tuple[float, ...]  # the same grid for every method
    updates: int

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return _gpt() if self.name == "text" else ResNet(channels=8)

    def train(self, seed: int) -> Iterator[Batch]:
        return _text(False, seed).batches() if self.name == "text" else _noisy(range(1400), seed)

    def held_out(self) -> Iterator[Batch]:
        found = _text(True, 99).batches() if self.name == "text" else _noisy(range(1400, 1797), 99)
        return (next(found) for _ in range(HELD_OUT))

    @staticmethod
    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, -2), target.flatten())

    def cuts(self, stages: int) -> list[str]:
        pieces = [PIECES * stage // stages for stage in range(1, stages)]
        if self.name == "digits":
            return [f"blocks.{piece}" for piece in pieces]
        return [f"blocks.{piece // 2}.{'between' if piece % 2 else 'before'}" for piece in pieces]


TASKS = {
    task.name: task
    for task in (
        Task("text", "small GPT on the Python manual", (1e-3, 3e-3, 1e-2), 200),
        Task("digits", "small ResNet on noisy digits", (1e-3, 3e-3, 1e-2), 200),
    )
}

LENGTH, WIDTH, HEADS = 16, 32, 2


@cache
def _text(held_out: bool, seed: int) -> TextData:
    """Windows of the manual; the last tenth of it is held out."""
    data = TextData(built_in_text(), ROWS, LENGTH, seed)
    cut = len(data.tokens) * 9 // 10
    data.tokens = data.tokens[cut:] if held_out else data.tokens[:cut]
    return data


def _gpt() -> GPT:
    """With a head of its own: a tied one would be as stale as the first stage (see the page)."""
    vocab = _text(False, 0).vocab
    assert vocab is not None
    model = GPT(vocab, WIDTH, HEADS, PIECES // 2, LENGTH)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.relu(self.norm(x)))


class ResNet(nn.Module):
    """Images (rows, 64) in, ten scores out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.entry = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Block(channels) for _ in range(PIECES))
        self.norm, self.head = nn.GroupNorm(2, channels), nn.Linear(channels * 16, 10)
        for block in self.blocks:
            block.conv.weight.data *= PIECES**-0.5  # the blocks add up along the residual path

    def forward(self, images: Tensor) -> Tensor:
        x = self.entry(images.unflatten(-1, (1, 8, 8)))
        for block in self.blocks:
            x = block(x)
        return self.head(F.avg_pool2d(F.relu(self.norm(x)), 2).flatten(1))


def _noisy(places: range, seed: int) -> Iterator[Batch]:
    table = digits(ROWS, seed)
    order = torch.randperm(len(table.inputs), generator=torch.Generator().manual_seed(0))
    chosen = order[places.start : places.stop]
    for number in count():
        source = torch.Generator().manual_seed(seed * 1_000_003 + number)
        rows = chosen[torch.randint(len(chosen), (ROWS,), generator=source)]
        images = table.inputs[rows]
        yield images + NOISE * torch.randn(images.shape, generator=source), table.target[rows]
