"""`penstock.profile`: what a user asks of a measurement, understood."""

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
from penstock.profiler.measure import Measured, Wish, measure
from penstock.profiler.sampling import Company, Show, unseen
from penstock.training.option_checks import autocast_of, check_loss, home_of
from penstock.training.stage_optimizers import made

MOST_THREADS = 1024  # torch dies where the system cannot give it as many as it was told to take
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
    """Measure every layer of a model here and now, for micro-batches like `example`.

    `loss(result, target)`, `optimizer` and `precision` are a Pipeline's; without an optimizer, updates cost nothing.
    `microbatches` is how many there are to a mini-batch. The model, its gradients and the random state are left as they
    were.
    """
    return profiled(
        model, example, target, loss=loss, optimizer=optimizer, precision=precision, microbatches=microbatches,
        repetitions=repetitions, threads=threads, seed=seed,
    ).profile  # fmt: skip


def profiled(
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
    company: Company | None = None,
    show: Show = unseen,
) -> Measured:
    """The same with all that is to be said of it; `company` are processes that measure at the same time."""
    loss = _required(model, loss)
    device = home_of(model)
    require_device((example, target), device)
    args, kwargs = as_call(example)
    rows = rows_of((args, kwargs), target)
    batch = Batch(args, kwargs, rows, _Scored(loss, target, rows), whole("microbatches", microbatches))
    wish = Wish(
        Settings(device, seed, autocast=autocast_of(precision, device)),
        None if optimizer is None else partial(made, optimizer),
        whole("repetitions", repetitions),
        whole("threads", threads, most=MOST_THREADS),
        company or Company(),
        show,
    )
    return measure(model, batch, wish)


@dataclass(frozen=True)
class _Scored:
    """Turns the model's result into a loss."""

    loss: LossFunction
    target: Any
    rows: int

    def __call__(self, result: Any) -> Loss:
        return read_loss(self.loss(result, self.target), self.rows)


def _required(model: Any, loss: LossFunction | None) -> LossFunction:
    if not isinstance(model, nn.Module):
        raise InputError("an nn.Module", repr(model)[:60], "give the model first")
    if loss is None:
        raise InputError("a loss, from which backwards start", "none", "give loss=, a function of result and target")
    check_loss(loss)
    if is_weightless(model):
        raise InputError("a model with weights, as it is to run", "a weightless one", "estimate it instead")
    return loss
