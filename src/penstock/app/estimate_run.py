"""`penstock estimate`: a config and a device in, the profile of one micro-batch out, and what it adds up to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from penstock.app.estimating import estimate_of
from penstock.app.start import Request
from penstock.app.task import Task
from penstock.errors import FormatError
from penstock.model.batch import as_call, piece, rows_of, spans
from penstock.model.materialise import weightless
from penstock.profiler.calibration import read_machine
from penstock.profiler.estimate import Estimate


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
