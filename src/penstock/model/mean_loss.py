"""Weights of torch's mean losses: `cross_entropy` and `nll_loss` divide by the number of targets that are not ignored.

Micro-batches with unequal counts of ignored targets must not count equally. While a micro-batch is scored, calls of
these functions are intercepted wherever they are made: in the user's loss, inside the model's forward, or in a library.

- A loss that is the mean itself is read as (sum, weight). The weights add up; nothing has to be known beforehand.
- A loss that contains the mean beside other terms (a balance loss, a second mean) is corrected: micro-batch m's mean
  should count w_m / W in the mini-batch, and counts r_m / R by its rows, so (w_m / W * R / r_m - 1) times the mean is
  added, times its factor in the loss. That factor is the derivative of the loss with respect to the mean: by the
  loss's graph or, where there is none, by forward-mode differentiation. W is counted from the labels.
- A mean over no target at all is 0 with weight 0, where torch returns NaN.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from penstock.model.labels import Labels, Scored

_NN: Any = torch._C._nn  # torch.nn.functional calls these, however the user has imported it
_MEAN, _SUM = 1, 2
Weight = float | torch.Tensor  # a tensor on an accelerator, to avoid a synchronization


@dataclass(frozen=True)
class Call:
    """One intercepted call."""

    mean: torch.Tensor
    result: torch.Tensor  # the returned tensor, which the caller may change
    version: int
    weight: Weight
    positions: int  # targets, ignored ones included
    total: Callable[[], float | None]  # returns the weight of the mini-batch; None where its labels are unknown
    share: Callable[[float | None], Weight]  # returns the factor of the mean for that weight

    def is_result(self, value: torch.Tensor) -> bool:
        """Whether a loss is this call's result, unchanged."""
        return value is self.result and value._version == self.version


class Part:
    """The calls of one micro-batch, intercepted within this context."""

    def __init__(self, labels: Labels, number: int, stage: int = 0, last: bool = True) -> None:
        self.labels, self.number, self.stage, self.last = labels, number, stage, last
        self.calls: list[Call] = []
        self.sums: list[torch.Tensor] = []  # sums that the user divides by the number of targets in the mini-batch
        self.level: Any = None
        self.outer: Part | None = None

    def __enter__(self) -> Part:
        _install(1)
        self.outer, _own.part = _own.part, self
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        _own.part = self.outer
        _install(-1)
        if self.level is not None:
            self.level.__exit__(None, None, None)
            self.level = None
        if kind is None and not self.last:
            self.note("mean")
        self.calls.clear()  # which know of this: results, and what is made of them, would live on until they are found
        self.sums.clear()

    def meet(self, run: Callable[[int], torch.Tensor], target: torch.Tensor, classes: Any, ignored: int) -> Any:
        """Return the result of an intercepted call."""
        weight = weight_of(target, classes, ignored)
        mean = _mean(run, weight)
        if torch.is_grad_enabled() and not mean.requires_grad:
            return mean  # a number without gradient
        number, asks = len(self.calls), self.last and not (isinstance(weight, float) and weight == 0)

        @cache
        def total() -> float | None:
            return self.labels.total(self.number, number, target, classes, ignored) if asks else None

        def share(total: float | None) -> Weight:
            return 1.0 if total is None else self.labels.share(self.number, weight, total)

        result = mean.clone() if torch.is_grad_enabled() else self._dual(mean, lambda: share(total()))
        self.calls.append(Call(mean, result, result._version, weight, target.numel(), total, share))
        return result

    def meet_sum(self, summed: torch.Tensor) -> torch.Tensor:
        """Return the result of a call that the user divides by the number of targets in the whole mini-batch."""
        if not torch.is_grad_enabled():
            return self._dual(summed, self._whole)
        self.sums.append(summed)
        return summed.clone()

    def corrected(self, value: torch.Tensor) -> torch.Tensor:
        """Return a loss in which the means count by their weights."""
        if self.level is not None:
            primal, tangent = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
            return primal if tangent is None else primal + tangent  # type: ignore[no-any-return]
        if not torch.is_grad_enabled():
            return value
        shares = [(call.mean, call.share(call.total())) for call in self.calls]
        shares += [(summed, self._whole()) for summed in self.sums]
        shares = [(mean, share) for mean, share in shares if not (isinstance(share, float) and share == 1.0)]
        if not shares:
            return value
        factors = torch.autograd.grad(value, [mean for mean, _ in shares], retain_graph=True, allow_unused=True)
        for (mean, share), factor in zip(shares, factors, strict=True):
            value = value if factor is None else value + factor * (share - 1.0) * mean
        return value

    def note(self, kind: str, nothing: bool = False) -> None:
        """Record how the micro-batch was scored; see Scored."""
        calls = tuple((call.weight, call.total() if kind == "mean" else None) for call in self.calls)
        self.labels.note(self.stage, self.number, Scored(self.labels.part_rows(self.number), kind, calls, nothing))

    def _whole(self) -> float:
        """Return the factor that turns a mean over rows into the sum, for a part of a sum."""
        return self.labels.rows / self.labels.part_rows(self.number)

    def _dual(self, mean: torch.Tensor, share: Callable[[], Weight]) -> torch.Tensor:
        """Return the mean with its correction as tangent."""
        found = share() if self.last else 1.0
        if (isinstance(found, float) and found == 1.0) or not self._differentiates():
            return mean
        return forward_ad.make_dual(mean.clone(), (found - 1.0) * mean)  # type: ignore[no-untyped-call,no-any-return]

    def _differentiates(self) -> bool:
        if self.level is None and forward_ad._current_level < 0:
            with warnings.catch_warnings():  # torch imports its rules for this with a deprecation warning
                warnings.simplefilter("ignore", DeprecationWarning)
                importlib.import_module("torch._decomp.decompositions_for_jvp")
            self.level = forward_ad.dual_level()
            self.level.__enter__()
        return self.level is not None


class safe_means:
    """A context for a backward, in which a user's checkpoint may repeat calls of means, so that they return no NaN
    either."""

    def __enter__(self) -> None:
        _install(1)

    def __exit__(self, *_: object) -> None:
        _install(-1)


def current() -> Part | None:
    """Return the micro-batch that this thread is scoring."""
    return _own.part


def weight_of(target: torch.Tensor, classes: torch.Tensor | None, ignored: int) -> Weight:
    """Return the number by which torch divides a sum over these targets."""
    if classes is None and target.device.type == "cpu":
        return float(target.numel() - np.count_nonzero(target.numpy() == ignored))
    kept = target != ignored
    if classes is None:
        found = kept.sum()
    else:
        found = (classes.detach().double()[torch.where(kept, target, 0)] * kept).sum()
    return float(found) if found.device.type == "cpu" else found


def _mean(run: Callable[[int], torch.Tensor], weight: Weight) -> torch.Tensor:
    if isinstance(weight, float):
        return run(_MEAN) if weight else run(_SUM)
    summed = run(_SUM)
    return summed / torch.where(weight > 0, weight, 1).to(summed.dtype)


class _Own(threading.local):
    def __init__(self) -> None:
        self.part: Part | None = None


_own = _Own()
_lock = threading.Lock()
_users = 0  # in all threads
_torchs: dict[str, Any] = {}


def _install(change: int) -> None:
    """Replace torch's functions by the ones below while some thread is scoring."""
    global _users
    with _lock:
        _users += change
        if _users != max(change, 0):
            return
        for name, ours in (("cross_entropy_loss", _cross_entropy), ("nll_loss_nd", _nll)):
            if change > 0:
                _torchs[name] = getattr(_NN, name)
            setattr(_NN, name, ours if change > 0 else _torchs[name])


def _cross_entropy(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    def run(how: int) -> torch.Tensor:
        name = "cross_entropy_loss"
        return _torchs[name](self, target, weight, how, ignore_index, label_smoothing)  # type: ignore[no-any-return]

    return _met(run, reduction, target, weight, ignore_index)


def _nll(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> torch.Tensor:
    def run(how: int) -> torch.Tensor:
        return _torchs["nll_loss_nd"](self, target, weight, how, ignore_index)  # type: ignore[no-any-return]

    return _met(run, reduction, target, weight, ignore_index)


def _met(
    run: Callable[[int], torch.Tensor], reduction: int, target: torch.Tensor, classes: Any, ignored: int
) -> torch.Tensor:
    part, plain = _own.part, target.is_floating_point() or target.is_meta or torch.compiler.is_compiling()
    if part is not None and part.labels.sums and reduction == _SUM and not plain:
        return part.meet_sum(run(_SUM))
    if plain or reduction != _MEAN:  # probabilities as targets are never ignored: their mean is over rows
        return run(reduction)
    if part is None:
        return _mean(run, weight_of(target, classes, ignored))
    return part.meet(run, target, classes, ignored)  # type: ignore[no-any-return]
