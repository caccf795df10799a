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
from penstock.profiler.estimate import Estimate, estimated
from penstock.training.option_checks import autocast_of
from penstock.training.stage_optimizers import made

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

    autocast = autocast_of(None if precision == "fp32" else precision, HOME)
    make = None if optimizer is None else partial(made, optimizer)
    return estimated(model, Batch(args, kwargs, rows, finish), machine, Settings(HOME, autocast=autocast), make)


def as_loss(result: Any) -> Loss:
    """Where nobody gives a loss: a gradient for all that the model returns."""
    wanted = [tensor for tensor in tree.tensors(result) if tensor.requires_grad]
    return Loss(wanted[0] if len(wanted) == 1 else sum((t.sum() for t in wanted), torch.zeros(())), 1.0)


def estimate_config(
    config: str | Path, device: str | None, precision: str | None = None, calibration: str | Path | None = None
) -> Estimate:
    """One micro-batch of a config, with its loss and optimizer; its model gets no weights."""
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
        said = str(error).partition("\n")[0]
        advice = "let the factory make the model, and leave the numbers in it alone"
        raise FormatError("model", "a model that can be made without its weights", said, advice) from error


def as_json(found: Estimate) -> dict[str, Any]:
    """The profile, which `penstock plan` reads, and totals."""
    totals = {"parameters": found.parameters, "flops": found.flops, "seconds": found.seconds, "tflops": _tflops(found)}
    return {**found.profile.to_json(), **totals}


def said(found: Estimate) -> Iterator[str]:
    """What a table of the layers does not say."""
    if found.whole is not None:
        yield f"one layer, as the model cannot be cut: {found.whole}"
    spent = f"{found.flops / 1e12:.4g} TFLOP in {found.seconds * 1e3:.4g} ms, {_tflops(found):.4g} TFLOP/s"
    yield f"{found.parameters:,} parameters; forward and backward {spent}"
    layers, room = found.profile.layers, found.machine.memory
    twice = sum(2 * layer.parameter_bytes + layer.buffer_bytes + layer.optimizer_bytes for layer in layers)
    needed = (twice + sum(layer.kept_bytes for layer in layers)) / 1e9
    limit = "" if room == float("inf") else f"; {found.machine.kind} has {room / 1e9:.4g}"
    yield f"all of it on one device would need {needed:.4g} GB, with gradients and one micro-batch{limit}"


def _tflops(found: Estimate) -> float:
    return found.flops / found.seconds / 1e12 if found.seconds else 0.0
