"""Small models in two forms: an ordinary `nn.Module` for an engine, and the same as stages of ops for the recursions.

Each is an `nn.Sequential` whose children are the stages. Values are float64 and start out equal in both forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recursions import Carried, Op, Place, Weights, places


@dataclass(frozen=True)
class Model:
    """The two forms, and where each parameter of the module is among the ops (`places`)."""

    module: nn.Sequential
    stages: list[list[Op]]
    places: dict[str, Place]
    loss: Callable[[Tensor, Tensor], Tensor]
    draw: Callable[[int], tuple[Tensor, Tensor]]  # that many rows of input and target

    def batches(self, count: int, rows: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(seed)
        return [self.draw(rows) for _ in range(count)]

    def named(self, weights: dict[Place, Tensor]) -> dict[str, Tensor]:
        """Weights of the ops under the names of the module's parameters."""
        return {name: weights[place] for name, place in self.places.items()}


def chain(stages: int, layers: int | None = None, width: int = 5, tied: tuple[int, int] | None = None) -> Model:
    """Linear and tanh, `layers` of each; `tied` names two layers that share their matrix."""
    torch.manual_seed(0)
    linears = [nn.Linear(width, width) for _ in range(layers or stages)]
    if tied:
        linears[tied[1]].weight = linears[tied[0]].weight
    module = joined([[linear, nn.Tanh()] for linear in linears], stages)
    return both(module, F.mse_loss, lambda rows: (floats(rows, width), floats(rows, width)))


def conv_net(stages: int, layers: int | None = None, channels: int = 3, side: int = 4, classes: int = 4) -> Model:
    """Convolution, norm and relu, `layers` times; then a mean over the picture and a classifier."""
    torch.manual_seed(0)
    groups: list[list[nn.Module]] = []
    for layer in range(layers or stages):
        conv = nn.Conv2d(channels if layer else 2, channels, 3, padding=1)
        groups.append([conv, nn.LayerNorm([channels, side, side]), nn.ReLU()])
    groups[-1] += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return both(
        joined(groups, stages),
        F.cross_entropy,
        lambda rows: (floats(rows, 2, side, side), torch.randint(0, classes, (rows,))),
    )


def gpt(
    stages: int,
    layers: int | None = None,
    tied: bool = True,
    width: int = 8,
    heads: int = 2,
    words: int = 11,
    length: int = 5,
) -> Model:
    """Embeddings, `layers` blocks, norm and head; `tied`: the head uses the first stage's token table."""
    torch.manual_seed(0)
    enter, head = Enter(words, width, length), nn.Linear(width, words, bias=False)
    if tied:
        head.weight = enter.tokens.weight
    groups: list[list[nn.Module]] = [[Block(width, heads)] for _ in range(layers or stages)]
    groups[0].insert(0, enter)
    groups[-1] += [nn.LayerNorm(width), head]
    return both(
        joined(groups, stages),
        lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()),
        lambda rows: (torch.randint(0, words, (rows, length)), torch.randint(0, words, (rows, length))),
    )


class Enter(nn.Module):
    def __init__(self, words: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias here: that of the keys has no gradient but rounding, which AdamW would blow up.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.relu(self.up(self.between(x))))


def ops(layer: nn.Module) -> list[Op]:
    """A layer of the module as ops. Weights are still the module's own parameters; `both` cuts them off."""
    match layer:
        case nn.Sequential():
            return [op for part in layer for op in ops(part)]
        case Enter():
            return [embedding(layer.tokens), position(layer.positions)]
        case Block():
            mix = [norm(layer.before), linear(layer.qkv), attention(layer.heads), linear(layer.out)]
            think = [norm(layer.between), linear(layer.up), plain(F.relu), linear(layer.down)]
            return [SAVE, *mix, ADD, SAVE, *think, ADD]
        case nn.Linear():
            return [linear(layer)]
        case nn.Conv2d():
            return [convolution(layer)]
        case nn.LayerNorm():
            return [norm(layer)]
        case nn.Tanh():
            return [plain(torch.tanh)]
        case nn.ReLU():
            return [plain(F.relu)]
        case nn.AdaptiveAvgPool2d():
            return [plain(lambda x: x.mean((-2, -1), keepdim=True))]
        case nn.Flatten():
            return [plain(lambda x: x.flatten(1))]
    raise TypeError(f"no ops are known for {type(layer).__name__}")


def on_first(run: Callable[[Tensor, Weights], Tensor]) -> Callable[[Carried, Weights], Carried]:
    """Work on the first tensor; pass the others on."""
    return lambda carried, weights: (run(carried[0], weights), *carried[1:])


def plain(run: Callable[[Tensor], Tensor]) -> Op:
    return Op(on_first(lambda x, weights: run(x)))


SAVE = Op(lambda carried, weights: (carried[0], *carried))
ADD = Op(lambda carried, weights: (carried[0] + carried[1], *carried[2:]))


def linear(layer: nn.Linear) -> Op:
    return Op(on_first(lambda x, w: F.linear(x, w["weight"], w.get("bias"))), own(layer))


def convolution(layer: nn.Conv2d) -> Op:
    return Op(on_first(lambda x, w: F.conv2d(x, w["weight"], w["bias"], layer.stride, layer.padding)), own(layer))


def norm(layer: nn.LayerNorm) -> Op:
    shape, eps = layer.normalized_shape, layer.eps
    return Op(on_first(lambda x, w: F.layer_norm(x, shape, w["weight"], w["bias"], eps)), own(layer))


def embedding(layer: nn.Embedding) -> Op:
    return Op(on_first(lambda ids, w: F.embedding(ids, w["weight"])), own(layer))


def position(layer: nn.Embedding) -> Op:
    return Op(on_first(lambda x, w: x + w["weight"][: x.shape[1]]), own(layer))


def attention(heads: int) -> Op:
    """Causal self-attention on queries, keys and values that lie packed in one tensor; written out, no weights."""

    def run(packed: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in packed.chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)

    return plain(run)


def own(layer: nn.Module) -> Weights:
    return dict(layer.named_parameters(recurse=False))


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def joined(groups: list[list[nn.Module]], stages: int) -> nn.Sequential:
    """The groups of layers as that many stages, as even as possible."""
    count = len(groups)
    if stages > count:
        raise ValueError(f"{stages} stages need at least as many layers, here are {count}")
    cuts = [count * s // stages for s in range(stages + 1)]
    return nn.Sequential(
        *(nn.Sequential(*(layer for group in groups[a:b] for layer in group)) for a, b in pairwise(cuts))
    )


def both(module: nn.Sequential, loss: Callable, draw: Callable) -> Model:
    """A module with the ops that do the same, on values of their own."""
    module.double()
    for layer in module.modules():  # a scale of 1 would hide which version of it a backward used
        if isinstance(layer, nn.LayerNorm):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
    drawn = [ops(stage) for stage in module]
    first: dict[int, Place] = {}
    for place, weight in places(drawn):
        first.setdefault(id(weight), place)
    values = {id(weight): weight.detach().clone() for _, weight in places(drawn)}
    stages = [[Op(op.run, {name: values[id(w)] for name, w in op.weights.items()}) for op in stage] for stage in drawn]
    return Model(module, stages, {name: first[id(p)] for name, p in module.named_parameters()}, loss, draw)
