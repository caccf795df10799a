"""Nesterov look-ahead for asynchronous pipelines (Ajanthan et al. 2025): NAdam with a long momentum.

A stashed gradient is as old as its stage is far from the end. Nesterov's step looks ahead along the momentum before the
gradient is added, which offsets that age where the momentum is long: 0.99 in place of NAdam's own 0.9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.core.arguments import named

if TYPE_CHECKING:
    from torch.optim import NAdam


def look_ahead(
    params: Any,
    lr: float = 2e-3,
    betas: tuple[float, float] = (0.99, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
) -> NAdam:
    """The optimizer itself; weight decay is apart from the gradients, as AdamW's is."""
    from torch.optim import NAdam

    return NAdam(params, lr, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay=True)


@named
def nesterov(
    lr: float,
    betas: tuple[float, float] = (0.99, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
) -> Callable[[Any], NAdam]:
    """For `Pipeline(..., schedule="pipedream", optimizer=penstock.nesterov(lr=3e-4))`."""
    return lambda params: look_ahead(params, lr, betas, eps, weight_decay, momentum_decay)
