"""A loss that is a mean does not say over how much. Where that is not the rows, micro-batches would count wrong.

On the first step the loss of the whole batch is compared with that over micro-batches. A difference must be the loss's
own, so it is looked for in one and the same result of the model, whole and by rows: batch normalisation and dropout,
which make other results of other batches, raise no alarm. A loss that the model computes itself has no such rows; it
is compared as it is, unless something in the model is random or depends on the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.model import tree
from penstock.model.batch import piece, spans
from penstock.model.loss import read_loss, total_of

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the loss; lower precisions: 1e-2


@dataclass(frozen=True)
class Batch:
    """The first step's batch, and the mean loss that the step found over its micro-batches."""

    rows: int
    parts: int
    mean: float
    coupled: bool  # a layer's result for one row depends on the others


def warn_if_hidden(loss: Callable[[Any, Any], Any], run: Callable[[int], Any], target: Any, batch: Batch) -> None:
    """Compare; `run` gives the model's result for the whole batch, with the randomness of some step."""
    try:
        result = run(0)
        value = loss(result, target)
    except Exception:
        return  # too large as a whole, or not to be run without gradients: nothing to compare with
    if isinstance(value, (tuple, list)) or not _apart(float(value), batch.mean, result):
        return
    if _is_the_result(value, result):
        hidden = not batch.coupled and bool(torch.equal(loss(run(1), target), value))
    else:
        by_rows = _by_rows(loss, result, target, batch)
        hidden = by_rows is not None and _apart(float(value), by_rows, result)
    if hidden:
        warnings.warn(
            f"expected the whole batch's loss to be the mean over its rows, but got {float(value):.6g} for the whole "
            f"and {batch.mean:.6g} over {batch.parts} micro-batches; return (sum, weight) from the loss, so that all "
            "rows count right",
            stacklevel=4,
        )


def _by_rows(loss: Callable[[Any, Any], Any], result: Any, target: Any, batch: Batch) -> float | None:
    """The loss over micro-batches of one result; None where the result has no rows to cut it by."""
    sizes = {tensor.shape[0] for tensor in tree.tensors(result) if tensor.dim() > 0}
    if not sizes or any(size % batch.rows for size in sizes):
        return None
    losses = []
    for first, last in spans(batch.rows, batch.parts):
        part = _rows(result, batch.rows, first, last)
        losses.append(read_loss(loss(part, piece(target, first, last)), last - first))
    return total_of(losses).mean


def _rows(result: Any, rows: int, first: int, last: int) -> Any:
    """Some rows of a result in which each row of the batch may have become several."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        times = tensor.shape[0] // rows if tensor.dim() else 0
        return tensor[first * times : last * times] if times else tensor

    return tree.replace(result, cut)


def _is_the_result(value: torch.Tensor, result: Any) -> bool:
    """Whether the model computed its loss itself. One of several scalars may be a balance loss, which may differ."""
    scalars = [tensor for tensor in tree.tensors(result) if tensor.dim() == 0 and tensor.is_floating_point()]
    return len(scalars) == 1 and bool(torch.equal(scalars[0], value))


def _apart(a: float, b: float, result: Any) -> bool:
    rough = max((TOLERANCE.get(t.dtype, 1e-2) for t in tree.tensors(result) if t.is_floating_point()), default=1e-4)
    return abs(a - b) > rough * max(abs(a), abs(b), 1e-6)
