"""The first step's loss against the whole batch's: what is wrong with how a batch is cut shows there.

Compared in eval mode, in which neither dropout nor batch normalisation makes other results of other batches. Three
values: over the micro-batches; of their results put together; and of the whole batch, run at once.

- The first two differ: the loss is a mean over something else than rows. It must return (sum, weight).
- The last differs from them, though nothing is random: rows are not the first dimension, or layers mix them. A scalar
  in the result may be a balance loss, which may do so; but where it is the loss itself, it hides its weights as above.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.model import tree
from penstock.model.batch import join, piece, spans
from penstock.model.loss import read_loss, total_of

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the loss; lower precisions: 1e-2

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Compared:
    """The results of a batch, of its micro-batches and at once."""

    loss: LossFunction
    target: Any
    rows: int
    parts: list[Any]
    whole: Any

    def hidden(self) -> tuple[float, float] | None:
        """The loss as a whole and over micro-batches, where a mean hides its weights; None where not."""
        value = self._tried(self.whole)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            return None
        mean = self._mean()
        together = value if self._inside(value) else self._together()
        return None if mean is None or together is None or not self._apart(together, mean) else (float(together), mean)

    def coupled(self) -> tuple[float, float] | None:
        """The same two, where the model makes another result of a row when others are beside it."""
        scalars = any(t.dim() == 0 and t.is_floating_point() for t in tree.tensors(self.whole))
        whole, mean = None if scalars else self._scored([self.whole], [(0, self.rows)]), self._mean()
        return (whole, mean) if whole is not None and mean is not None and self._apart(whole, mean) else None

    def _mean(self) -> float | None:
        return self._scored(self.parts, spans(self.rows, len(self.parts)))

    def _scored(self, results: list[Any], cuts: list[tuple[int, int]]) -> float | None:
        """The mean loss of some results, as a step would find it; None where a step would refuse it."""
        try:
            values = [self.loss(r, piece(self.target, *cut, self.rows)) for r, cut in zip(results, cuts, strict=True)]
            return total_of([read_loss(v, last - first) for v, (first, last) in zip(values, cuts, strict=True)]).mean
        except Exception:
            return None

    def _together(self) -> Any:
        try:
            result = join(self.parts, [last - first for first, last in spans(self.rows, len(self.parts))])
        except Exception:
            return None  # results that no rows can be seen in
        return self._tried(result)

    def _inside(self, value: torch.Tensor) -> bool:
        """Whether the model computed its loss itself. One of several scalars may be a balance loss."""
        scalars = [t for t in tree.tensors(self.whole) if t.dim() == 0 and t.is_floating_point()]
        return len(scalars) == 1 and bool(torch.equal(scalars[0], value))

    def _tried(self, result: Any) -> Any:
        try:
            return self.loss(result, self.target)
        except Exception:
            return None  # not to be had in eval mode, or too large as a whole: nothing to compare with

    def _apart(self, a: Any, b: Any) -> bool:
        found = [t for t in tree.tensors(self.whole) if t.is_floating_point()]
        rough = max((TOLERANCE.get(t.dtype, 1e-2) for t in found), default=1e-4)
        return abs(float(a) - float(b)) > rough * max(abs(float(a)), abs(float(b)), 1e-6)


def warn_hidden(whole: float, mean: float, parts: int) -> None:
    warnings.warn(
        f"expected the whole batch's loss to be the mean over its rows, but got {whole:.6g} for the whole and "
        f"{mean:.6g} over {parts} micro-batches; return (sum, weight) from the loss, so that all rows count right. One "
        "that is taken inside forward is taken outside for that, in loss=; one that compares rows with each other, as "
        "a contrastive loss does, sees those of one micro-batch alone: give microbatches=1",
        stacklevel=5,
    )


def warn_coupled(whole: float, mean: float, parts: int) -> None:
    warnings.warn(
        f"expected a model whose result for one row does not depend on the others, but got a loss of {whole:.6g} for "
        f"the whole batch and {mean:.6g} over {parts} micro-batches; give inputs whose first dimension is the rows "
        "(batch_first=True, say), or know that layers which mix rows see one micro-batch at a time",
        stacklevel=5,
    )
