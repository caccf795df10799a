"""A Llama of any size with random weights, and random tokens for it, named in llama_7b.toml."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def make_model(vocab: int, width: int, inner: int, layers: int, heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_batches(rows: int, length: int, vocab: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same on every worker: drawn from a seed."""
    source = torch.Generator().manual_seed(0)
    for _ in range(1000):
        tokens = torch.randint(vocab, (rows, length + 1), generator=source)
        yield tokens[:, :-1], tokens[:, 1:]


def next_token(result: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(result.logits.flatten(0, 1).float(), target.flatten())
