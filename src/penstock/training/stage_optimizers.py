"""The user's optimizers and LR schedulers, one a stage, and the gradients that have been added up for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError
from penstock.training.finite_gradients import (
    Fault,
    Gradients,
    all_finite,
    gradient_fault,
    rate_fault,
    require_finite_settings,
)
from penstock.training.optimizer_step import advance, update
from penstock.training.sharded_state import ShardedState

GROW_AFTER = 2000  # updates without an overflow after which the fp16 scale doubles, as torch's own scaler does


class Optimizers:
    """The optimizers of the stages of one process; `owned` are the parameters of these stages.

    `accumulate` steps make one update. `scale` is what fp16 losses are multiplied with.
    """

    def __init__(
        self,
        owned: dict[int, dict[str, nn.Parameter]],
        make: Callable[..., torch.optim.Optimizer] | None,
        make_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
        clip: float | None,
        accumulate: int,
        fp16: bool,
    ) -> None:
        self.owned = {at: list(stage.values()) for at, stage in owned.items()}
        self.names = {parameter: name for stage in owned.values() for name, parameter in stage.items()}
        self.parameters = list(self.names)
        self.make = make
        self.optimizers = {at: make_optimizer(make, stage) for at, stage in owned.items() if stage} if make else {}
        self.schedulers = (
            [_scheduler(make_scheduler, optimizer) for optimizer in self.optimizers.values()] if make_scheduler else []
        )
        self.by_stage = dict(zip(self.optimizers, self.schedulers, strict=False))
        self.clip, self.accumulate, self.fp16 = clip, accumulate, fp16
        self.sharded: ShardedState | None = None  # how replicas divide the parameters
        self.fetch: Callable[[int], None] = lambda stage: None  # has a stage's weights where its update needs them
        self.scale = 2.0**16 if fp16 else 1.0
        self.good = 0  # updates since the scale changed
        self.updating: int | None = None  # the stage whose update is under way, or has failed
        self.sums: Gradients = {}  # of the steps since the last update, not yet divided
        self.weight, self.steps, self.unit = 0.0, 0, 1.0

    def fault(self, gradients: Gradients) -> Fault:
        """Return what is wrong with the first stage here that cannot be updated."""
        faults = [rate_fault(optimizer, stage) for stage, optimizer in self.optimizers.items()]
        if not all_finite(gradients):
            for stage, owned in self.owned.items():
                own = {parameter: gradients[parameter] for parameter in owned if parameter in gradients}
                faults.append(gradient_fault(own, self.names, stage))
        return next((fault for fault in faults if fault), {})

    def grow(self) -> None:
        """Count an update; fp16's scale doubles after many without an overflow."""
        self.good += 1
        if self.fp16 and self.good % GROW_AFTER == 0:
            self.scale *= 2

    def shrink(self) -> None:
        """Halve fp16's scale after an overflow."""
        self.scale, self.good = self.scale / 2, 0

    def step(self, stage: int, gradients: Gradients) -> None:
        """Update the weights that a stage owns. `.grad` is afterwards what it was before."""
        optimizer = self.optimizers.get(stage)
        if optimizer is None:
            return
        owned = self.owned[stage]
        before = [parameter.grad for parameter in owned]
        for parameter in owned:
            parameter.grad = gradients.get(parameter)
        try:
            update(optimizer)
        finally:
            for parameter, gradient in zip(owned, before, strict=True):
                parameter.grad = gradient

    def advance(self, stage: int, loss: float) -> None:
        """Take a stage's LR scheduler to the rate of its next update."""
        scheduler = self.by_stage.get(stage)
        if scheduler is not None:
            advance(scheduler, loss)


def require_scale(scale: float, step: int) -> None:
    """Raise for gradients that overflow at fp16's lowest scale, 1: they are not finite in the model itself."""
    if scale <= 1:
        came = f"some that are not at a scale of 1, at step {step}"
        raise InputError(
            "gradients that are finite under fp16 at some scale", came, "use bf16, or look for what is nan"
        )


def make_optimizer(make: Callable[..., torch.optim.Optimizer], owned: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Make the user's optimizer of one stage: from tensors, or from names and tensors if the function takes two."""
    optimizer = make(list(owned), list(owned.values())) if _takes_two(make) else make(list(owned.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            "optimizer= to make an optimizer",
            type(optimizer).__name__,
            "give a function: optimizer=lambda params: AdamW(params)",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            "an optimizer that steps once a batch",
            f"{type(optimizer).__name__}, which evaluates the loss several times",
            "use another optimizer",
        )
    own = {id(parameter) for parameter in owned.values()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise InputError(
            "an optimizer over the parameters it was given",
            f"{len(foreign)} that are not the stage's",
            "build it from the argument: optimizer=lambda params: AdamW(params)",
        )
    require_finite_settings(optimizer)
    return optimizer


def _scheduler(make: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer) -> Any:
    scheduler = make(optimizer)
    if not callable(getattr(scheduler, "step", None)):
        raise InputError(
            "lr_scheduler= to make an LR scheduler",
            type(scheduler).__name__,
            "give a function: lr_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 100)",
        )
    require_finite_settings(optimizer)
    return scheduler


def _takes_two(make: Callable[..., Any]) -> bool:
    if not callable(make):
        raise InputError(
            "optimizer= to be a function", type(make).__name__, "give optimizer=lambda params: AdamW(params)"
        )
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters) == 2
