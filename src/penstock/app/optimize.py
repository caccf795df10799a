"""Updates: one optimizer a stage, over gradients that were divided by their weight, clipped and checked together."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.app.advance import advance, update
from penstock.app.gradients import (
    Fault,
    Gradients,
    all_finite,
    gradient_fault,
    rate_fault,
    refusal,
    require_finite_settings,
    values_of,
)
from penstock.engine.alone import Alone
from penstock.engine.ties import Ties
from penstock.engine.world import World
from penstock.errors import InputError
from penstock.model.loss import Total

GROW_AFTER = 2000  # updates without an overflow after which the fp16 scale doubles, as torch's own scaler does


class Update(NamedTuple):
    """What became of a step's gradients."""

    updated: bool
    norm: float | None = None  # of all gradients together, before clipping; None where nobody asked


class Optimizers:
    """The optimizers of all stages, and what must be agreed between them before any of them steps.

    A step's gradients are gathered apart from what `.grad` held before: that is nobody's to divide, and it must be
    there again if the step fails. `owned` are the parameters of the stages that this process runs.
    """

    def __init__(
        self,
        owned: dict[int, dict[str, nn.Parameter]],
        make: Callable[..., torch.optim.Optimizer] | None,
        make_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
        clip: float | None,
        accumulate: int,
        fp16: bool,
        world: World | Alone,
        ties: Ties,
    ) -> None:
        if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
            raise InputError("clip to be a positive norm", clip, "correct clip or leave it out")
        if not isinstance(accumulate, int) or accumulate < 1:
            raise InputError("accumulate to be at least 1 step", accumulate, "correct accumulate")
        self.owned = {at: list(stage.values()) for at, stage in owned.items()}
        self.names = {parameter: name for stage in owned.values() for name, parameter in stage.items()}
        self.parameters = list(self.names)
        self.make, self.world, self.ties = make, world, ties
        self.optimizers = {at: made(make, stage) for at, stage in owned.items() if stage} if make else {}
        self.schedulers = (
            [_scheduler(make_scheduler, optimizer) for optimizer in self.optimizers.values()] if make_scheduler else []
        )
        self.by_stage = dict(zip(self.optimizers, self.schedulers, strict=False))
        self.clip, self.accumulate, self.fp16 = clip, accumulate, fp16
        self.turn: Callable[[int], None] = lambda stage: None  # told whose weights are needed next
        self.scale = 2.0**16 if fp16 else 1.0
        self.good = 0  # updates since the scale changed
        self.updating: int | None = None  # the stage whose update is under way, or has failed
        self.fresh: Gradients = {}
        self.sums: Gradients = {}  # not yet divided
        self.weight, self.steps, self.unit = 0.0, 0, 1.0

    def root(self, rows: int) -> float:
        """What a loss's gradient starts from: about that of the mean, lest a sum over many rows overflow in fp16."""
        if self.steps == 0:
            self.unit = float(rows)
        return self.scale / self.unit

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Around a step's backwards: afterwards their gradients are apart, and `.grad` is as before."""
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            yield
            self.fresh = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
            for parameter, tied in self.ties.collect().items():
                own = self.fresh.get(parameter)  # of a loss that reads the weight itself, to keep it small
                self.fresh[parameter] = tied if own is None else tied + own
        finally:
            for parameter, gradient in zip(self.parameters, before, strict=True):
                _give(parameter, gradient)

    def finish(self, found: Total, step: int) -> Update:
        """Take in one step's gradients and, when enough have come, update. All ranks refuse what is not finite."""
        if self.accumulate > 1 and not self.fp16 and self.make is not None:
            fresh, self.fresh = self.fresh, {}
            self._require_finite(fresh, step)  # before it gets among the sums of other steps
            self.fresh = fresh
        for parameter, gradient in self.fresh.items():
            known = self.sums.get(parameter)
            self.sums[parameter] = gradient if known is None else known.add_(gradient)
        self.fresh = {}
        self.weight += found.weight
        self.steps += 1
        if self.steps < self.accumulate:
            return Update(False)
        gradients = self._divided()
        norm = self._norm(gradients)
        usable = self._usable(gradients, norm, step)
        if self.make is None:
            for parameter, gradient in gradients.items() if usable else ():
                _give(parameter, gradient)
            return Update(False, norm)
        try:
            if usable:
                self._update(gradients, found.mean)
        finally:  # whatever an optimizer says: nothing of this step may be added to the next one's
            for parameter in self.parameters:
                parameter.grad = None
        return Update(usable, norm)

    def _divided(self) -> Gradients:
        """The sums divided by their weight, and added to what `.grad` holds."""
        gradients, rest = self.sums, self.weight * self.scale / self.unit
        self.sums, self.weight, self.steps = {}, 0.0, 0
        if gradients and rest != 1:
            torch._foreach_div_(list(gradients.values()), rest)
        for parameter in self.parameters:
            if parameter.grad is not None:
                known = gradients.get(parameter)
                before = parameter.grad
                gradients[parameter] = before if known is None else known.add_(before.to(known.device))
        return gradients

    def _norm(self, gradients: Gradients) -> float | None:
        """The global norm, and clipping by it as torch does; None where nobody asks."""
        if self.clip is None and not self.fp16:
            return None
        every = [values_of(gradients, parameter) for parameter in gradients]
        norm = self._total_norm([self.names[parameter] for parameter in gradients], every)
        if self.clip is not None and every and isfinite(norm):
            torch._foreach_mul_(every, min(1.0, self.clip / (norm + 1e-6)))
        return norm

    def _total_norm(self, names: list[str], every: list[torch.Tensor]) -> float:
        """Over all ranks: each tensor's norm by its name, added in one order, so that all find the same bits."""
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(every)]).tolist() if every else []
        parts = self.world.gather(json.dumps(dict(zip(names, norms, strict=True))).encode())
        found = {name: norm for part in parts for name, norm in json.loads(part).items()}
        return float(torch.linalg.vector_norm(torch.tensor([found[n] for n in sorted(found)], dtype=torch.float64)))

    def _usable(self, gradients: Gradients, norm: float | None, step: int) -> bool:
        """Whether the gradients of all stages are finite; under fp16 the scale adapts to the answer, and else they have
        to be."""
        if norm is not None and not isfinite(norm):
            if not self.fp16:
                raise self._refusal(self._fault(gradients), step, norm)
            require_scale(self.scale, step)
            self.scale, self.good = self.scale / 2, 0
            return False
        if self.make is not None:
            self._require_finite({} if norm is not None else gradients, step)
        self.good += 1
        if self.fp16 and self.good % GROW_AFTER == 0:
            self.scale *= 2
        return True

    def _require_finite(self, gradients: Gradients, step: int) -> None:
        """Before anything of an update is applied, on any rank."""
        fault = self._fault(gradients)
        if not self.world.all_well(not fault):
            raise self._refusal(fault, step)

    def _fault(self, gradients: Gradients) -> Fault:
        """What is wrong with the first stage here that cannot be updated."""
        faults = [rate_fault(optimizer, stage) for stage, optimizer in self.optimizers.items()]
        if not all_finite(gradients):
            for stage, owned in self.owned.items():
                mine = {parameter: gradients[parameter] for parameter in owned if parameter in gradients}
                faults.append(gradient_fault(mine, self.names, stage))
        return next((fault for fault in faults if fault), {})

    def _refusal(self, fault: Fault, step: int, norm: float | None = None) -> InputError:
        """The same error on all ranks: every one of them has to call."""
        return refusal([json.loads(part) for part in self.world.gather(json.dumps(fault).encode())], step, norm)

    def _update(self, gradients: Gradients, loss: float) -> None:
        for stage, optimizer in self.optimizers.items():
            self.updating = stage
            self.turn(stage)
            for parameter in self.owned[stage]:
                parameter.grad = gradients.get(parameter)
            update(optimizer)
            for parameter in self.owned[stage]:
                parameter.grad = None
        self.ties.spread()
        for scheduler in self.schedulers:
            advance(scheduler, loss)
        self.updating = None


def _give(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Set `.grad`; weights that wait in host memory have theirs there."""
    parameter.grad = None if gradient is None else gradient.to(parameter.device)


def require_scale(scale: float, step: int) -> None:
    """Refuse gradients that overflow though fp16's scale has come down to 1: infinities are its ordinary business, but
    those are the model's own."""
    if scale <= 1:
        came = f"some that are not at a scale of 1, at step {step}"
        raise InputError(
            "gradients that are finite under fp16 at some scale", came, "use bf16, or look for what is nan"
        )


def made(make: Callable[..., torch.optim.Optimizer], owned: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The user's optimizer over one stage: called with tensors, or with names and tensors where it takes two."""
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
    mine = {id(parameter) for parameter in owned.values()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in mine]
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
        wanted = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in wanted) == 2
