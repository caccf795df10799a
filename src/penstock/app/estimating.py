"""`penstock.estimate`: what a user asks of an estimate, understood."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.app.optimize import made
from penstock.app.settings import read_precision
from penstock.core.arguments import named
from penstock.core.profile import Profile
from penstock.errors import InputError
from penstock.model import tree
from penstock.model.batch import as_call, rows_of
from penstock.model.fakes import HOME
from penstock.model.loss import Loss, read_loss
from penstock.model.stage import Settings
from penstock.profiler.bench import Batch
from penstock.profiler.calibration import read_machine
from penstock.profiler.devices import Machine
from penstock.profiler.estimate import Estimate, estimated

PRECISIONS = ("fp32", "bf16", "fp16")


@named
def estimate(
    model: nn.Module,
    example: Any,
    device: str | None = None,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    precision: str | None = None,
    calibration: str | Path | None = None,
) -> Profile:
    """The profile that a micro-batch like `example` would have on a device such as "h100".

    The model needs no weights (it may be built under `penstock.model.materialise.weightless()`), and none are touched.
    `loss(result, target)`, `optimizer` and `precision` are a Pipeline's; what is not given costs nothing. A calibration
    file corrects what is known of the device.
    """
    machine = read_machine(device, calibration)
    return estimate_of(model, example, target, machine, loss=loss, optimizer=optimizer, precision=precision).profile


def estimate_of(
    model: nn.Module,
    example: Any,
    target: Any,
    machine: Machine,
    *,
    loss: Callable[[Any, Any], Any] | None,
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    precision: str | None,
) -> Estimate:
    """The same with all that went into it."""
    if not isinstance(model, nn.Module):
        raise InputError("an nn.Module", repr(model)[:60], "give the model first")
    if precision not in (None, *PRECISIONS):
        raise InputError(f"precision to be one of {', '.join(PRECISIONS)}", repr(precision), "choose one of them")
    (args, kwargs), target = tree.replace((as_call(example), target), lambda tensor: tensor.to(HOME))
    rows = rows_of((args, kwargs), target)

    def finish(result: Any) -> Loss:
        return as_loss(result) if loss is None else read_loss(loss(result, target), rows)

    autocast = read_precision(None if precision == "fp32" else precision, HOME)
    make = None if optimizer is None else partial(made, optimizer)
    return estimated(model, Batch(args, kwargs, rows, finish), machine, Settings(HOME, autocast=autocast), make)


def as_loss(result: Any) -> Loss:
    """Where nobody gives a loss: a gradient for all that the model returns."""
    wanted = [tensor for tensor in tree.tensors(result) if tensor.requires_grad]
    return Loss(wanted[0] if len(wanted) == 1 else sum((t.sum() for t in wanted), torch.zeros(())), 1.0)
