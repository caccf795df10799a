"""Small models for the guard, each with batches and a loss; always the same weights and values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, LENGTH = 32, 16, 8
IGNORED = -100  # the label that cross_entropy does not count


class Task(NamedTuple):
    """What is trained: `batches` are pairs of inputs and target, `example` two rows of inputs."""

    model: nn.Module
    batches: list[tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    example: Any


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        query, key, value = self.qkv(self.norm(x)).view(rows, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.drop(F.gelu(self.out(mixed.transpose(1, 2).reshape(rows, length, width))))


class GPT(nn.Module):
    """The token table and the head are one weight, on the first and the last stage; all blocks share another, whose
    gradients are more than two, so that the order in which they are added can be seen in the bits."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight
        for block in self.blocks:
            block.out.weight = self.blocks[0].out.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


class UNet(nn.Module):
    """Skips cross all stages that lie between their ends."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        sizes = range(3, 4 + depth)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.middle = nn.Conv2d(sizes[-1], sizes[-1], 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(2 * b, a, 3, padding=1) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = F.relu(down(x))
            skips.append(x)
            x = F.max_pool2d(x, 2, ceil_mode=True)
        x = self.middle(x)
        for up in reversed(self.up):
            skip = skips.pop()
            x = up(torch.cat([F.interpolate(x, skip.shape[-2:]), skip], 1))
        return x


def task(kind: str, pieces: int, batches: int) -> Task:
    """A model that can be cut into so many pieces. The fourth batch has fewer rows than the others."""
    torch.manual_seed(7)
    return _TASKS[kind](pieces, [8 if at != 3 else 5 for at in range(batches)])


def _gpt(pieces: int, rows: list[int]) -> Task:
    batches = [_words(count) for count in rows]
    return Task(GPT(pieces // 2 + 1), batches, _score_words, batches[0][0][:2])


def _unet(pieces: int, rows: list[int]) -> Task:
    model = UNet((pieces + 1) // 2)
    batches = [(torch.randn(count, 3, 8, 8), torch.randn(count, 3, 8, 8)) for count in rows]
    return Task(model, batches, F.mse_loss, batches[0][0][:2])


def _batchnorm(pieces: int, rows: list[int]) -> Task:
    """More rows than the others, as a norm needs two in each micro-batch."""
    blocks = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(pieces))
    model = nn.Sequential(*blocks)
    batches = [(torch.randn(4 * count, 6), torch.randn(4 * count, 6)) for count in rows]
    return Task(model, batches, F.mse_loss, batches[0][0][:2])


def _llama(pieces: int, rows: list[int]) -> Task:
    """Labels are among the inputs, and the loss is the model's own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=pieces // 2 + 1,
        num_attention_heads=2, num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    batches = [({"input_ids": ids, "labels": labels}, None) for ids, labels in map(_words, rows)]
    example = {name: value[:2] for name, value in batches[0][0].items()}
    return Task(model, batches, lambda result, target: result.loss, example)


def _words(rows: int) -> tuple[Tensor, Tensor]:
    """Rows with different numbers of labels that count."""
    labels = torch.randint(0, WORDS, (rows, LENGTH))
    kept = torch.arange(LENGTH) <= torch.arange(rows)[:, None] % LENGTH + 1
    return torch.randint(0, WORDS, (rows, LENGTH)), labels.where(kept, IGNORED)


def _score_words(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


_TASKS = {"gpt": _gpt, "unet": _unet, "batchnorm": _batchnorm, "llama": _llama}
MODELS = tuple(_TASKS)
