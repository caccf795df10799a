"""Small models, and plain training of them without any pipeline: what the numbers of a pipeline are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LENGTH, IGNORED = 23, 6, -100
BITS = 0.0 if torch.get_default_device().type == "cpu" else 1e-12  # a GPU's kernels do not repeat their own


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias here: that of the keys has no gradient but rounding, which AdamW would blow up.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """Token table and head share one weight, which the first and the last stage then both use."""

    def __init__(self, words: int = WORDS, width: int = 8, layers: int = 8, heads: int = 2, longest: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mlp(width: int = 6, layers: int = 8) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*parts)


def conv_net(channels: int = 4, layers: int = 8) -> nn.Sequential:
    parts: list[nn.Module] = []
    for layer in range(layers):  # no bias: before a norm it has no gradient but rounding
        conv = nn.Conv2d(channels if layer else 2, channels, 3, padding=1, bias=False)
        parts += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3))


class Experts(nn.Module):
    """Two experts and a router; the second result is a balance loss, which depends on all rows at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.router(x).softmax(-1)
        balance = share.mean(0).square().sum() * 2
        return x + torch.stack([e(x) for e in self.experts], -1).mul(share.unsqueeze(-2)).sum(-1), balance


class Mixture(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.middle = nn.ModuleList(Experts(width) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, extra = self.first(x), x.new_zeros(())
        for layer in self.middle:
            x, balance = layer(x)
            extra = extra + balance
        return self.last(x), extra


def token_loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def counted_token_loss(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = target.flatten() != IGNORED
    return F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum"), kept.sum()


def mean_token_loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


@dataclass(frozen=True)
class Case:
    """A model and batches for it; `by_parts` where a row's result depends on its micro-batch."""

    model: nn.Module
    loss: Callable[[Any, Any], Any]
    batches: list[tuple[Any, Any]]
    by_parts: bool = False

    def fresh(self) -> nn.Module:
        return copy.deepcopy(self.model)

    @property
    def example(self) -> Any:
        return self.batches[0][0][:2]


def tokens(rows: int, length: int = LENGTH) -> Tensor:
    return torch.randint(0, WORDS, (rows, length))


def with_ignored(rows: int) -> tuple[Tensor, Tensor]:
    """Tokens, and targets of which some rows count six and others hardly any; the last micro-batch has none."""
    x, y = tokens(rows), tokens(rows)
    for row in range(rows):
        y[row, 6 - row % 6 :] = IGNORED
    y[-2:] = IGNORED
    return x, y


def case(kind: str, rows: int = 8, steps: int = 5, dtype: torch.dtype = torch.float64) -> Case:
    torch.manual_seed(3)
    if kind == "gpt":
        return Case(GPT().to(dtype), token_loss, [(tokens(rows), tokens(rows)) for _ in range(steps)])
    if kind == "mlp":
        data = [(torch.randn(rows, 6, dtype=dtype), torch.randn(rows, 6, dtype=dtype)) for _ in range(steps)]
        return Case(mlp().to(dtype), F.mse_loss, data)
    images = [(torch.randn(rows, 2, 5, 5, dtype=dtype), torch.randint(0, 3, (rows,))) for _ in range(steps)]
    return Case(conv_net().to(dtype), F.cross_entropy, images, by_parts=True)


def parts_of(value: Tensor, parts: int) -> list[Tensor]:
    rows = len(value)
    return [value[rows * k // parts : rows * (k + 1) // parts] for k in range(parts)]


def backward(model: nn.Module, loss: Callable[[Any, Any], Any], x: Any, y: Any, parts: int = 1) -> float:
    """One batch's mean loss, its gradients left in the model; by a loop over micro-batches where parts > 1, of a row
    each where there are fewer rows."""
    total, parts = 0.0, min(parts, len(x))
    for a, b in zip(parts_of(x, parts), parts_of(y, parts), strict=True):
        value = loss(model(a), b) * (len(a) / len(x))
        value.backward()
        total += value.item()
    return total


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def trained(
    given: Case, parts: int = 1, make: Callable[[Any], torch.optim.Optimizer] = adamw
) -> tuple[list[float], Any]:
    """Plain training over a case's batches: the losses, and the model afterwards."""
    model = given.fresh()
    optimizer, losses = make(model.parameters()), []
    for x, y in given.batches:
        losses.append(backward(model, given.loss, x, y, parts))
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def off(found: dict[str, Tensor], wanted: dict[str, Tensor], leave_out: set[str] = frozenset()) -> float:
    """The largest distance of any tensor from what it should be, in parts of its norm."""
    assert found.keys() == wanted.keys()
    return max(
        ((found[name] - wanted[name]).double().norm() / wanted[name].double().norm().clamp(min=1e-30)).item()
        for name in wanted
        if name not in leave_out
    )
