"""A small GPT: causal attention, learned positions, and one weight for token embedding and head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SPREAD = 0.02  # standard deviation of initial weights


class Attention(nn.Module):
    """Causal multi-head attention: every position attends to itself and to earlier ones."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        # No bias here: that of the keys would change nothing but rounding.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        query, key, value = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return result


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.between, self.mlp = nn.LayerNorm(width), MLP(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.before(x)))
        result: Tensor = x + self.drop(self.mlp(self.between(x)))
        return result


class GPT(nn.Module):
    """Decoder from token numbers (rows, length) to scores of every next token (rows, length, vocab)."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int, length: int, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"expected a width that {heads} heads can share, but got {width}; make it a multiple")
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialize)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # each block adds two outputs to the residual path
                nn.init.normal_(weight, std=SPREAD / math.sqrt(2 * layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=SPREAD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
