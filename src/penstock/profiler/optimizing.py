"""What an optimizer does and keeps for each parameter: a step over fakes, one for each shape that there is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.model.fakes import fake
from penstock.model.heap import bytes_of
from penstock.profiler.counting import Counting, Work
from penstock.profiler.updates import Make, Named


class Step(NamedTuple):
    """For one parameter: the work of an update, once there is a state, and the bytes of that state."""

    work: Work
    state: int


def steps_of(make: Make, named: Named, mode: FakeTensorMode) -> dict[str, Step]:
    """By name. Parameters of one shape and type are the same to an optimizer, unless it goes by their names: then those
    that it puts into groups alike are."""
    known: dict[tuple[torch.Size, torch.dtype, str], Step] = {}
    found: dict[str, Step] = {}
    for name, parameter in named.items():
        if parameter.requires_grad:
            mine = nn.Parameter(fake(mode, parameter))
            optimizer = make({name: mine})
            group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
            kind = (parameter.shape, parameter.dtype, repr(group))
            if kind not in known:
                known[kind] = _step(optimizer, mine)
            found[name] = known[kind]
    return found


def _step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Step:
    counting = Counting()
    parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    with counting:
        parameter.grad.div_(2.0)  # by the weight of the batch
        optimizer.step()
    return Step(counting.work, bytes_of(value for state in optimizer.state.values() for value in state.values()))
