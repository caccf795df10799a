"""Whether a loss is a sum over rows, as far as their labels go.

Of a mean over rows, or a sum, a row's labels change its own part and nothing else: what a change in one row does to the
gradient is the same whether another row has changed or not. A mean over counted labels has another divisor then. Terms
that mix rows without regard to labels, as a balance loss does, cancel out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch

from penstock.model.loss import Loss

ROUGH = {torch.float64: 0.02, torch.float32: 0.02}  # of what a change does; lower precisions: 0.05
NOTHING = 1e-6  # of the gradient: a change that does no more does nothing


def goes_by_labels(gradients: list[torch.Tensor], sure: bool = True) -> bool | None:
    """Of the gradients for the labels as they are; changed in one row; in another; in both. None: nobody can tell.

    Labels that are not `sure` to be any that the loss takes may have gradients that are no numbers; else these come of
    a mean over nothing.
    """
    plain, one, other, both = (gradient.double() for gradient in gradients)
    size = float(plain.norm())
    effect = max(float((plain - one).norm()), float((plain - other).norm()))
    mixed = float((plain - one - other + both).norm())
    if not isfinite(size):
        return None
    if not isfinite(effect) or not isfinite(mixed):
        return True if sure else None
    rough = ROUGH.get(gradients[0].dtype, 0.05)
    return effect > NOTHING * size and mixed > rough * effect


def gradient_of(
    run: Callable[[dict[int, torch.Tensor]], Any], received: dict[int, torch.Tensor], parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The gradient of a loss by what the last stage receives; by its parameters, which are more, where that is nothing
    (a head that begins with zeros)."""
    with torch.enable_grad():
        leaves = {v: t.detach().requires_grad_(t.is_floating_point()) for v, t in received.items()}
        loss = run(leaves)
        if not isinstance(loss, Loss):
            raise TypeError("no loss to look at")
        total = loss.value * loss.times
        found = _by(total, [t for t in leaves.values() if t.requires_grad])
        return found if bool(found.any()) else _by(total, [p for p in parameters if p.requires_grad])


def _by(total: torch.Tensor, wanted: list[torch.Tensor]) -> torch.Tensor:
    if not wanted:
        return torch.zeros(0)
    found = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True, retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in found])
