"""The work and state of an optimizer for each parameter, from a step over a fake parameter of each shape."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.model.fakes import fake
from penstock.model.heap import bytes_of
from penstock.profiler.counting import Counting, Work
from penstock.profiler.updates import Make, Named


class OptimizerStep(NamedTuple):
    """The update of one parameter: its work once there is a state, and the bytes of that state."""

    work: Work
    state: int


def optimizer_steps(make: Make, named: Named, mode: FakeTensorMode) -> dict[str, OptimizerStep]:
    """Return the steps by parameter name. Parameters of one shape and type are computed once, unless the optimizer puts
    them into different groups by their names."""
    step_of_kind: dict[tuple[torch.Size, torch.dtype, str], OptimizerStep] = {}
    steps: dict[str, OptimizerStep] = {}
    for name, parameter in named.items():
        if parameter.requires_grad:
            fake_parameter = nn.Parameter(fake(mode, parameter))
            optimizer = make({name: fake_parameter})
            group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
            kind = (parameter.shape, parameter.dtype, repr(group))
            if kind not in step_of_kind:
                step_of_kind[kind] = _step(optimizer, fake_parameter)
            steps[name] = step_of_kind[kind]
    return steps


def _step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> OptimizerStep:
    counting = Counting()
    parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    with counting:
        parameter.grad.div_(2.0)  # by the weight of the batch
        optimizer.step()
    return OptimizerStep(
        counting.work, bytes_of(value for state in optimizer.state.values() for value in state.values())
    )
