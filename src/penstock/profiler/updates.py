"""Measure the optimizer: steps of the user's optimizer over copies of each layer's parameters.

Layers are measured in groups as large as memory allows, so that a step reads from memory and not from caches. An
optimizer over a whole group shows the overhead of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from penstock.core.links import FloatArray
from penstock.model.heap import bytes_of
from penstock.profiler.work_timer import WorkTimer

TOGETHER = 2**28  # bytes of parameters that are copied at a time
STEPS = 5  # timed steps, after one that creates the optimizer's state
SOME_WEIGHT = 1.001  # gradients are divided by it, as before an update

Named = dict[str, nn.Parameter]
Make = Callable[[Named], torch.optim.Optimizer]
Gradient = Callable[[nn.Parameter], torch.Tensor | None]


class UpdateCosts(NamedTuple):
    """Seconds and bytes of state by layer, and the overhead in seconds of a stage's update."""

    seconds: FloatArray
    bytes: list[int]
    own: float


class _Optimized:
    """Copies of parameters with gradients, and their optimizer."""

    def __init__(self, parameters: Named, make: Make) -> None:
        self.optimizer = make(parameters)
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        self.gradients = [gradient for gradient in gradients if gradient.layout is torch.strided]

    def step(self) -> None:
        if self.gradients:
            torch._foreach_div_(self.gradients, SOME_WEIGHT)
        self.optimizer.step()

    @property
    def bytes(self) -> int:
        return bytes_of(value for state in self.optimizer.state.values() for value in state.values())


def measure_updates(layers: Sequence[Named], make: Make, gradient: Gradient, device: torch.device) -> UpdateCosts:
    """Measure the updates of all layers. `gradient` returns a parameter's gradient, or None."""
    seconds, sizes = np.zeros(len(layers)), [0] * len(layers)
    whole = more = 0.0
    trained = [at for at, layer in enumerate(layers) if layer]
    groups = list(_groups(trained, [bytes_of(layer.values()) for layer in layers]))
    for group in groups:
        copies = [_copied(layers[at], gradient) for at in group]
        alone = [_Optimized(copy, make) for copy in copies]
        joint = _Optimized({name: p for copy in copies for name, p in copy.items()}, make)
        *each, together = _timed([*alone, joint], device)
        seconds[group] = each
        for at, one in zip(group, alone, strict=True):
            sizes[at] = one.bytes
        whole, more = whole + together, more + sum(each) - together
    own = max(more, 0.0) / max(len(trained) - len(groups), 1)
    left = np.where(seconds > 0, np.maximum(seconds - own, 0.0), 0.0)
    scale = max(whole - len(groups) * own, 0.0) / max(float(left.sum()), 1e-12)
    return UpdateCosts(left * scale, sizes, own)


def _groups(trained: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of layers that are copied together."""
    group: list[int] = []
    for at in trained:
        if group and sum(sizes[one] for one in group) + sizes[at] > TOGETHER:
            yield group
            group = []
        group.append(at)
    if group:
        yield group


def _copied(layer: Named, gradient: Gradient) -> Named:
    copies = {}
    for name, parameter in layer.items():
        copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        given = gradient(parameter)
        copy.grad = None if given is None else given.detach().clone()
        copies[name] = copy
    return copies


def _timed(every: Sequence[_Optimized], device: torch.device) -> list[float]:
    """Return the median seconds of a step of each, alternating between them."""
    timer = WorkTimer(device)
    for step in range(STEPS + 1):
        for at, one in enumerate(every):
            timer.run((step, at), one.step)
    read = timer.read()
    return [float(np.median([read[step + 1, at] for step in range(STEPS)])) for at in range(len(every))]
