"""`penstock.profile`: check a user's arguments and measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.core.arguments import named
from penstock.core.profile import Profile
from penstock.core.validation import whole
from penstock.errors import InputError
from penstock.model.batch import as_call, require_device, rows_of
from penstock.model.loss import Loss, read_loss
from penstock.model.materialise import is_weightless
from penstock.model.stage import Settings
from penstock.profiler.bench import Batch
from penstock.profiler.measure import MeasuredProfile, MeasureOptions, measure
from penstock.profiler.sampling import Peers, Show, no_progress
from penstock.training.option_checks import autocast_of, check_loss, home_of
from penstock.training.stage_optimizers import make_optimizer

MOST_THREADS = 1024  # torch crashes where the system cannot start as many threads as it is set to
LossFunction = Callable[[Any, Any], Any]
Optimizer = Callable[..., torch.optim.Optimizer]


@named
def profile(
    model: nn.Module,
    example: Any,
    *,
    loss: LossFunction | None = None,
    target: Any = None,
    optimizer: Optimizer | None = None,
    precision: str | None = None,
    microbatches: int = 4,
    repetitions: int = 10,
    threads: int = 1,
    seed: int = 0,
) -> Profile:
    """Measure every layer of a model on this machine, for micro-batches like `example`.

    `loss(result, target)`, `optimizer` and `precision` are a Pipeline's; without an optimizer, updates cost nothing.
    `microbatches` is the number in a mini-batch. The model, its gradients and the random state are left unchanged.
    """
    return measure_profile(
        model, example, target, loss=loss, optimizer=optimizer, precision=precision, microbatches=microbatches,
        repetitions=repetitions, threads=threads, seed=seed,
    ).profile  # fmt: skip


def measure_profile(
    model: nn.Module,
    example: Any,
    target: Any,
    *,
    loss: LossFunction | None,
    optimizer: Optimizer | None,
    precision: str | None,
    microbatches: int,
    repetitions: int,
    threads: int,
    seed: int,
    peers: Peers | None = None,
    show: Show = no_progress,
) -> MeasuredProfile:
    """Measure a profile, and return it with the details of the measurement; `peers` are processes that measure at the
    same time."""
    loss = _require_loss(model, loss)
    device = home_of(model)
    require_device((example, target), device)
    args, kwargs = as_call(example)
    rows = rows_of((args, kwargs), target)
    batch = Batch(args, kwargs, rows, _BatchLoss(loss, target, rows), whole("microbatches", microbatches))
    options = MeasureOptions(
        Settings(device, seed, autocast=autocast_of(precision, device)),
        None if optimizer is None else partial(make_optimizer, optimizer),
        whole("repetitions", repetitions),
        whole("threads", threads, most=MOST_THREADS),
        peers or Peers(),
        show,
    )
    return measure(model, batch, options)


@dataclass(frozen=True)
class _BatchLoss:
    """The loss of a model's result."""

    loss: LossFunction
    target: Any
    rows: int

    def __call__(self, result: Any) -> Loss:
        return read_loss(self.loss(result, self.target), self.rows)


def _require_loss(model: Any, loss: LossFunction | None) -> LossFunction:
    if not isinstance(model, nn.Module):
        raise InputError("an nn.Module", repr(model)[:60], "give the model first")
    if loss is None:
        raise InputError("a loss, from which backwards start", "none", "give loss=, a function of result and target")
    check_loss(loss)
    if is_weightless(model):
        raise InputError("a model with weights, as it is to run", "a weightless one", "estimate it instead")
    return loss
