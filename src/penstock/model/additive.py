"""Test whether a loss is a sum over rows with respect to their labels.

In a mean or sum over rows, a row's labels change only its own term: the effect of a change in one row on the gradient
is the same whether another row has changed or not. In a mean over counted labels, the divisor changes. Terms that mix
rows independently of labels, such as a balance loss, cancel out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch

from penstock.model.loss import Loss

ROUGH = {torch.float64: 0.02, torch.float32: 0.02}  # of the effect of a change; 0.05 in lower precisions
NOTHING = 1e-6  # of the gradient: a smaller change counts as none


def goes_by_labels(gradients: list[torch.Tensor], sure: bool = True) -> bool | None:
    """Return whether the loss depends on label counts, from the gradients for the original labels; changed in one row;
    in another; in both. None where it cannot be determined.

    Labels that are not `sure` to be valid for the loss may have NaN gradients; with valid ones, NaN is due to a mean
    over nothing.
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
    """Return the gradient of a loss with respect to the last stage's inputs, or to its more numerous parameters where
    that is zero (a head that begins with zeros)."""
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
