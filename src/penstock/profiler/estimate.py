"""Estimate a profile for another device, of a model without weights: counted work against the limits of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from penstock.core.profile import Profile
from penstock.errors import InputError
from penstock.model import tree
from penstock.model.fakes import fake, faked
from penstock.model.layers import layers_of
from penstock.model.passage import Passage
from penstock.model.stage import Job, Settings
from penstock.model.untouched import copied, untouched
from penstock.model.walk import users_line
from penstock.profiler.attention import fused_attention
from penstock.profiler.bench import Batch
from penstock.profiler.counting import flops
from penstock.profiler.devices import Machine
from penstock.profiler.layer_costs import layer_costs
from penstock.profiler.layer_work import count_work
from penstock.profiler.optimizer_steps import optimizer_steps
from penstock.profiler.updates import Make


@dataclass(frozen=True)
class Estimate:
    """An estimated profile, and the totals behind it."""

    profile: Profile
    machine: Machine
    parameters: int
    flops: int  # of one micro-batch, forward and backward
    whole: str | None = None  # why the model is one layer, where it could not be cut

    @property
    def seconds(self) -> float:
        """Seconds of one micro-batch on one device."""
        return sum(layer.seconds for layer in self.profile.layers)


def estimate_profile(
    model: nn.Module, batch: Batch, machine: Machine, settings: Settings, make: Make | None = None
) -> Estimate:
    """Estimate a profile. The batch is in host memory; the model may have no weights, and is not changed. `make` builds
    the optimizer from named parameters."""
    args, kwargs = copied((batch.args, batch.kwargs))
    fused = nullcontext() if machine.kind == "cpu" else fused_attention()
    with untouched(model), faked(model) as mode, fused, _without_numbers():
        # Tensors with a graph must be fake, too: torch does not allow a mix.
        args, kwargs = tree.replace((args, kwargs), lambda t: fake(mode, t).requires_grad_() if t.requires_grad else t)
        layers = layers_of(model, args, kwargs)
        path = layers.split.first
        job = Job(0, -1, args, kwargs, batch.rows, path, batch.finish, passage=Passage.of(path.trace))
        done = count_work(layers, job, settings)
        steps = optimizer_steps(make, dict(model.named_parameters()), mode) if make is not None else {}
        costs = tuple(layer_costs(layers, at, done, steps, machine) for at in range(len(layers)))
    profile = Profile(costs, tuple(layers.edges), batch.rows, f"{machine.kind} (estimated)", done.sent)
    total = sum(flops(part) for one in done.work for part in (one.forward, one.input_grad, one.weight_grad))
    why = None if layers.whole is None else str(layers.whole)
    return Estimate(profile, machine, sum(parameter.numel() for parameter in model.parameters()), total, why)


@contextmanager
def _without_numbers() -> Iterator[None]:
    """Raise a clear error if a forward of fake tensors needs their numbers."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise InputError(
            "a model whose path and shapes do not depend on the numbers that it computes",
            f"{error.func} at {_line(error)}",
            "profile it on a device instead",
        ) from None


def _line(error: BaseException) -> str:
    """Return the line in the user's code."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return users_line(step.tb_frame) if step is not None else "unknown line"
