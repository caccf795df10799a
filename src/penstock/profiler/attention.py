"""Fused attention for estimates, with dropout too: on a CPU, dropout would compute all scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F


@contextmanager
def fused_attention() -> Iterator[None]:
    """Replace attention by a call without dropout. Its cost is the same: a fused kernel draws dropout itself and keeps
    nothing."""
    original = F.scaled_dot_product_attention

    def fused(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        return original(query, key, value, attn_mask, 0.0, *args, **kwargs)

    F.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
