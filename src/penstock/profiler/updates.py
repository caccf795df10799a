"""What the optimizer costs: steps of the user's own over copies of each layer's parameters.

Layers are taken together as long as they fit, so that a step finds its numbers in memory and not in the caches. An
optimizer over all of them tells what every step takes for itself, whatever it updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from penstock.core.links import FloatArray
from penstock.model.heap import bytes_of
from penstock.profiler.laps import Laps

TOGETHER = 2**28  # bytes of parameters that are copied at a time
STEPS = 5  # that are timed, after one that makes the optimizer's state
SOME_WEIGHT = 1.001  # by which gradients are divided, as they are before an update

Named = dict[str, nn.Parameter]
Make = Callable[[Named], torch.optim.Optimizer]
Gradient = Callable[[nn.Parameter], torch.Tensor | None]


class Updates(NamedTuple):
    """By layer: seconds, and bytes of state. And the seconds that a stage's update takes beside its layers'."""

    seconds: FloatArray
    bytes: list[int]
    own: float


class _Optimized:
    """Parameters that may be changed, with gradients, and an optimizer of theirs."""

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


def measure_updates(layers: Sequence[Named], make: Make, gradient: Gradient, device: torch.device) -> Updates:
    """`gradient` gives what there is for a parameter, or None where it has none."""
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
    return Updates(left * scale, sizes, own)


def _groups(trained: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Runs of layers that are copied together."""
    group: list[int] = []
    for at in trained:
        if group and sum(sizes[one] for one in group) + sizes[at] > TOGETHER:
            yield group
            group = []
        group.append(at)
    if group:
        yield group


def _copied(layer: Named, gradient: Gradient) -> Named:
    found = {}
    for name, parameter in layer.items():
        copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        given = gradient(parameter)
        copy.grad = None if given is None else given.detach().clone()
        found[name] = copy
    return found


def _timed(every: Sequence[_Optimized], device: torch.device) -> list[float]:
    """Median seconds of a step of each, in turn."""
    laps = Laps(device)
    for step in range(STEPS + 1):
        for at, one in enumerate(every):
            laps.run((step, at), one.step)
    read = laps.read()
    return [float(np.median([read[step + 1, at] for step in range(STEPS)])) for at in range(len(every))]
