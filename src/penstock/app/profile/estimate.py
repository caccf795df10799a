"""Estimate a profile without the hardware: `penstock.estimate`, and `penstock estimate` for a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.app.config.task import Task
from penstock.app.run.request import Request
from penstock.core.arguments import named
from penstock.core.profile import Profile
from penstock.errors import FormatError, InputError
from penstock.model import tree
from penstock.model.batch import as_call, piece, rows_of, spans
from penstock.model.fakes import HOME
from penstock.model.loss import Loss, read_loss
from penstock.model.materialise import weightless
from penstock.model.stage import Settings
from penstock.profiler.bench import Batch
from penstock.profiler.calibration import read_machine
from penstock.profiler.devices import Machine
from penstock.profiler.estimate import Estimate, estimate_profile
from penstock.training.option_checks import autocast_of
from penstock.training.stage_optimizers import make_optimizer

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
    """Estimate the profile of a micro-batch like `example` on a device such as "h100".

    The model needs no weights (it may be built under `penstock.model.materialise.weightless()`), and none are touched.
    `loss(result, target)`, `optimizer` and `precision` are a Pipeline's; those that are not given cost nothing. A
    calibration file corrects the figures of the device.
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
    """Estimate a profile, and return it with the details of the estimate."""
    if not isinstance(model, nn.Module):
        raise InputError("an nn.Module", repr(model)[:60], "give the model first")
    if precision not in (None, *PRECISIONS):
        raise InputError(f"precision to be one of {', '.join(PRECISIONS)}", repr(precision), "choose one of them")
    (args, kwargs), target = tree.replace((as_call(example), target), lambda tensor: tensor.to(HOME))
    rows = rows_of((args, kwargs), target)

    def finish(result: Any) -> Loss:
        return as_loss(result) if loss is None else read_loss(loss(result, target), rows)

    autocast = autocast_of(None if precision == "fp32" else precision, HOME)
    make = None if optimizer is None else partial(make_optimizer, optimizer)
    return estimate_profile(model, Batch(args, kwargs, rows, finish), machine, Settings(HOME, autocast=autocast), make)


def as_loss(result: Any) -> Loss:
    """Return a loss with a gradient for all that the model returns, where no loss is given."""
    results = [tensor for tensor in tree.tensors(result) if tensor.requires_grad]
    return Loss(results[0] if len(results) == 1 else sum((t.sum() for t in results), torch.zeros(())), 1.0)


def estimate_config(
    config: str | Path, device: str | None, precision: str | None = None, calibration: str | Path | None = None
) -> Estimate:
    """Estimate one micro-batch of a config, with its loss and optimizer; its model gets no weights."""
    machine, task = read_machine(device, calibration), Request(str(config)).task()
    inputs, target = next(task.batches(0, 1))
    rows = rows_of(as_call(inputs), target)
    first = spans(rows, task.config.pipeline.microbatches)[0]
    return estimate_of(
        _built(task), piece(inputs, *first, rows), piece(target, *first, rows), machine,
        loss=task.loss, optimizer=task.optimizer, precision=precision or task.precision,
    )  # fmt: skip


def _built(task: Task) -> nn.Module:
    try:
        with weightless():
            return task.model()
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        advice = "let the factory build the model without reading its numbers"
        raise FormatError("model", "a model that can be made without its weights", reason, advice) from error


def as_json(result: Estimate) -> dict[str, Any]:
    """Return the profile, which `penstock plan` reads, and totals."""
    totals = {
        "parameters": result.parameters,
        "flops": result.flops,
        "seconds": result.seconds,
        "tflops": _tflops(result),
    }
    return {**result.profile.to_json(), **totals}


def notes(result: Estimate) -> Iterator[str]:
    """Yield the lines that complete the table of layers."""
    if result.whole is not None:
        yield f"one layer, as the model cannot be cut: {result.whole}"
    spent = f"{result.flops / 1e12:.4g} TFLOP in {result.seconds * 1e3:.4g} ms, {_tflops(result):.4g} TFLOP/s"
    yield f"{result.parameters:,} parameters; forward and backward {spent}"
    layers, room = result.profile.layers, result.machine.memory
    standing = sum(2 * layer.parameter_bytes + layer.buffer_bytes + layer.optimizer_bytes for layer in layers)
    needed = (standing + sum(layer.kept_bytes for layer in layers)) / 1e9
    limit = "" if room == float("inf") else f"; {result.machine.kind} has {room / 1e9:.4g}"
    yield f"all of it on one device would need {needed:.4g} GB, with gradients and one micro-batch{limit}"


def _tflops(result: Estimate) -> float:
    return result.flops / result.seconds / 1e12 if result.seconds else 0.0
