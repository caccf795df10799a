"""Compare the first batch's loss with that of its micro-batches: a mean that hides its weights shows there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import InputError
from penstock.model import tree
from penstock.model.batch import join, piece, spans
from penstock.model.labels import Labels, Memory
from penstock.model.loss import Loss, read_loss, total_of
from penstock.model.mean_loss import Part, weight_of

LOSS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the loss, or its gradient; lower precisions: 1e-2

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class LossComparison:
    """The model's results for a batch's micro-batches and for the whole batch, and the micro-batches' losses."""

    loss: LossFunction
    inputs: Any
    target: Any
    rows: int
    parts: list[Any]
    losses: list[Loss] | None  # None where a step would refuse them
    whole: Any

    def hidden(self) -> tuple[float, float] | None:
        """Return the loss of the whole batch and over micro-batches if a mean hides its weights, else None."""
        value = self._tried(self.whole)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            return None
        scalars = self._scalars()
        if any(torch.equal(scalar, value) for scalar in scalars):
            mean = None if self.losses is None or len(scalars) > 1 else total_of(self.losses).mean
            return None if mean is None or not self._apart(value, mean) else (float(value), mean)
        return self._outside()

    def coupled(self) -> tuple[float, float] | None:
        """Return the same two if the model's result for a row depends on the rows beside it, else None."""
        if self._scalars():
            return None
        whole, losses = self._tried(self.whole), self._losses(self.parts)
        if losses is None or whole is None:
            return None
        at_once, mean = total_of([read_loss(whole, self.rows)]).mean, total_of(losses).mean
        return (at_once, mean) if self._apart(at_once, mean) else None

    def _outside(self) -> tuple[float, float] | None:
        """Return the same two for a loss that is computed from the model's result."""
        parts = [tree.replace(part, _leaf) for part in self.parts]
        with torch.enable_grad():
            try:
                together = self.loss(join(parts, [last - first for first, last in self._cuts()]), self.target)
            except Exception:
                return None  # results that no rows can be seen in, or too large as a whole
            losses = self._losses(parts)
            if losses is None or not isinstance(together, torch.Tensor) or together.numel() != 1:
                return None
            weight = sum(float(loss.weight) for loss in losses)
            mean = torch.stack([loss.value * (loss.times / weight) for loss in losses]).sum()
            if not (together.requires_grad and mean.requires_grad):
                return (float(together), float(mean)) if self._apart(together, mean) else None
            at_once, by_parts = _loss_gradients(together, parts), _loss_gradients(mean, parts)
        if not _differ(torch.cat(at_once), torch.cat(by_parts), self._tolerance()):
            return None
        if all(_parallel(one, other, self._tolerance()) for one, other in zip(at_once, by_parts, strict=True)):
            _refuse_weights(at_once, by_parts)
        return float(together), float(mean)

    def _losses(self, results: list[Any]) -> list[Loss] | None:
        """Return the losses of micro-batches' results as a step computes them; None where a step refuses them."""
        labels, losses = Labels((self.inputs, self.target), self._cuts(), Memory(), weight_of), []
        try:
            for number, (result, (first, last)) in enumerate(zip(results, self._cuts(), strict=True)):
                with Part(labels, number):
                    value = self.loss(result, piece(self.target, first, last, self.rows))
                    losses.append(read_loss(value, last - first))
        except Exception:
            return None
        return losses if sum(float(loss.weight) for loss in losses) > 0 else None

    def _cuts(self) -> list[tuple[int, int]]:
        return spans(self.rows, len(self.parts))

    def _scalars(self) -> list[torch.Tensor]:
        """Return scalars among the model's results, which may be losses that it computed itself."""
        return [t for t in tree.tensors(self.whole) if t.dim() == 0 and t.is_floating_point()]

    def _tried(self, result: Any) -> Any:
        try:
            return self.loss(result, self.target)
        except Exception:
            return None  # it cannot be computed in eval mode, or is too large as a whole

    def _tolerance(self) -> float:
        results = [t for t in tree.tensors(self.whole) if t.is_floating_point()]
        return max((LOSS_TOLERANCE.get(t.dtype, 1e-2) for t in results), default=1e-4)

    def _apart(self, a: Any, b: Any) -> bool:
        return abs(float(a) - float(b)) > self._tolerance() * max(abs(float(a)), abs(float(b)), 1e-6)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _loss_gradients(total: torch.Tensor, parts: list[Any]) -> list[torch.Tensor]:
    """Return the gradient by each micro-batch's result, as one row of numbers."""
    leaves = [[t for t in tree.tensors(part) if t.requires_grad] for part in parts]
    every = [leaf for some in leaves for leaf in some]
    gradients: Iterator[torch.Tensor] = iter(
        torch.autograd.grad(total, every, allow_unused=True, materialize_grads=True)
    )
    return [torch.cat([_numbers(next(gradients)) for _ in some]) for some in leaves]


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(gradient) if gradient.is_complex() else gradient).flatten().double()


def _differ(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return bool((one - other).norm() > tolerance * max(one.norm(), other.norm()))


def _parallel(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    square = float(other.dot(other))
    return not _differ(one, other * (float(one.dot(other)) / square if square else 0.0), tolerance)


def _refuse_weights(at_once: list[torch.Tensor], by_parts: list[torch.Tensor]) -> None:
    pairs = zip(at_once, by_parts, strict=True)
    shares = [float(one.norm() / max(float(other.norm()), 1e-300)) for one, other in pairs]
    raise InputError(
        "a loss that is a mean over rows, or (sum, weight)",
        "a mean that weighs rows differently: in the whole batch's, micro-batches count "
        f"{', '.join(f'{share:.3g}' for share in shares[:8])}{' ...' if len(shares) > 8 else ''} times their rows",
        "return (sum, weight) from the loss",
    )


def warn_hidden(whole: float, mean: float, parts: str) -> None:
    warnings.warn(
        f"expected the whole batch's loss to be the mean over its rows, but got {whole:.6g} for the whole and "
        f"{mean:.6g} over {parts}; return (sum, weight) from the loss, so that all rows count right. One "
        "that is taken inside forward is taken outside for that, in loss=; one that compares rows with each other, as "
        "a contrastive loss does, sees those of one micro-batch alone: give microbatches=1",
        stacklevel=5,
    )


def warn_coupled(whole: float, mean: float, parts: str) -> None:
    warnings.warn(
        f"expected a model whose result for one row does not depend on the others, but got a loss of {whole:.6g} for "
        f"the whole batch and {mean:.6g} over {parts}; give inputs whose first dimension is the rows "
        "(batch_first=True, say), or know that layers which mix rows see one micro-batch at a time",
        stacklevel=5,
    )
