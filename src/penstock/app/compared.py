"""How far a pipeline's gradients and weights are from plain training's: the largest distances, by stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

FLOOR = 1e-3  # of the largest tensor's norm: what is smaller is measured by this, lest rounding alone look large


@dataclass
class Distance:
    """The worst of many tensors: a number's largest difference, a tensor's in parts of its norm, and its name."""

    absolute: float = 0.0
    relative: float = 0.0
    name: str = ""

    def meet(self, other: Distance) -> None:
        """Keep the worse; a distance that is no number is the worst."""
        if other.relative > self.relative or other.relative != other.relative:
            self.relative, self.name = other.relative, other.name
        self.absolute = max(self.absolute, other.absolute)


@dataclass
class StageDistance:
    """Of one stage, over all steps."""

    stage: int
    tensors: int = 0
    gradient: Distance = field(default_factory=Distance)
    weight: Distance = field(default_factory=Distance)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StageDistance:
        return cls(data["stage"], data["tensors"], Distance(**data["gradient"]), Distance(**data["weight"]))


class Recorder:
    """Makes a pipeline's optimizers, and sees the gradients they are given, by the model's own names."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.make = make
        self.weights: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def optimizer(self, names: list[str], params: list[Tensor]) -> torch.optim.Optimizer:
        made = self.make(names, params)
        mine = dict(zip(names, params, strict=True))
        self.weights |= mine

        def look(*_: Any) -> None:
            self.gradients |= {name: p.grad.detach().clone() for name, p in mine.items() if p.grad is not None}

        made.register_step_pre_hook(look)
        return made


def distances(found: dict[str, Tensor], wanted: dict[str, Tensor], largest: float) -> dict[str, Distance]:
    """Of every tensor that either has; one that only one of them has is infinitely far."""
    every = {}
    for name in found.keys() | wanted.keys():
        if name not in found or name not in wanted:
            every[name] = Distance(float("inf"), float("inf"), name)
            continue
        off = (found[name].detach() - wanted[name].detach()).double()
        scale = max(wanted[name].double().norm().item(), FLOOR * largest, 1e-300)
        every[name] = Distance(off.abs().max().item() if off.numel() else 0.0, off.norm().item() / scale, name)
    return every


def largest_norm(tensors: dict[str, Tensor]) -> float:
    return max((tensor.detach().double().norm().item() for tensor in tensors.values()), default=0.0)
