"""The result of a loss function: a mean over rows, or a sum and its weight. Both become a sum and a weight, which can
be added."""

from __future__ import annotations

import struct
from math import isfinite
from typing import Any, NamedTuple

import torch

from penstock.errors import InputError
from penstock.model.mean_loss import Part, current

_PACKED = struct.Struct("<2d")


class Loss(NamedTuple):
    """The loss of one micro-batch: a sum, `value` times `times`, and the weight by which it is divided in the end.

    `value` carries the graph; its gradient starts from `times`, which saves an operation.
    """

    value: torch.Tensor
    weight: float | torch.Tensor
    times: float = 1.0

    @property
    def total(self) -> float:
        """The sum."""
        return float(self.value) * self.times


def read_loss(value: Any, rows: int) -> Loss:
    """Interpret the result of the user's loss function for a micro-batch of `rows` rows.

    While a micro-batch is scored (see mean_loss), means that torch divides by counted targets have their weights.
    """
    part = current()
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise InputError("a loss to be a mean, or (sum, weight)", f"{len(value)} values", "return one or two")
        total, weight = value
        if part is not None:
            part.note("sum")
        return Loss(_scalar(total, "the sum of (sum, weight)"), _weight(weight))
    scalar = _scalar(value, "a loss")
    return Loss(scalar, float(rows), float(rows)) if part is None else _weighed(part, value, scalar, rows)


def _weighed(part: Part, value: torch.Tensor, scalar: torch.Tensor, rows: int) -> Loss:
    """Return the loss of a micro-batch that may contain calls of means over counted targets."""
    memory, calls = part.labels.memory, part.calls
    if len(calls) == 1 and calls[0].is_result(value):
        memory.pure = True
        part.note("pure")
        weight = memory.in_units(calls[0].weight, calls[0].positions, rows)
        return Loss(scalar, weight, weight) if isinstance(weight, float) else Loss(scalar * weight, weight)
    if not calls and float(scalar.detach()) == 0:  # probably a micro-batch without targets
        part.note("pure" if memory.pure else "mean", nothing=True)
        return Loss(scalar, 0.0, 0.0) if memory.pure else Loss(scalar, float(rows), float(rows))
    if calls:
        memory.pure = False
    scalar = part.corrected(scalar)
    part.note("mean")
    return Loss(scalar, float(rows), float(rows))


class Total(NamedTuple):
    """Sum and weight of a whole batch."""

    total: float
    weight: float

    @property
    def mean(self) -> float:
        return self.total / self.weight

    def pack(self) -> bytes:
        return _PACKED.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Total:
        return cls(*_PACKED.unpack(data))

    def require_usable(self) -> None:
        """Raise if gradients cannot be divided by the weight, or the sum is not finite."""
        if not (self.weight > 0 and isfinite(self.weight)):
            raise InputError("a batch whose loss has a positive weight", self.weight, "skip batches without targets")
        if not isfinite(self.total):
            raise InputError(
                "a finite loss",
                self.total,
                "look at the batch that gave it, lower the learning rate, or return (sum, weight) where a micro-batch "
                "may have nothing to average",
            )


def total_of(losses: list[Loss]) -> Total:
    return Total(sum(loss.total for loss in losses), sum(float(loss.weight) for loss in losses))


def _scalar(value: Any, what: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{what} to be a tensor", type(value).__name__, "return the loss tensor itself")
    if value.numel() != 1:
        raise InputError(
            f"{what} to be a scalar", f"shape {tuple(value.shape)}", "reduce it: .mean(), or (sum, weight)"
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise InputError(
            f"{what} that depends on parameters which require grad",
            "one that does not",
            "check that the model's output is used and not detached, and that parameters are not all frozen",
        )
    # Multiplied by the rows, and for fp16 by a scale, a half would overflow.
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _weight(weight: Any) -> float | torch.Tensor:
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        return weight.detach()
    if isinstance(weight, (int, float)) and not isinstance(weight, bool):
        return float(weight)
    came = f"shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight).__name__
    raise InputError("the weight of (sum, weight) to be a number", came, "return how many rows or tokens were summed")
