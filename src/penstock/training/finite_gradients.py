"""Checks that the gradients and settings of an update are finite."""

from __future__ import annotations

import cmath
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError

Gradients = dict[nn.Parameter, torch.Tensor]
Fault = dict[str, Any]  # what is wrong on one rank, in a form that can be sent; empty where nothing is
ADVICE = "nothing of this update was applied: lower the learning rate, or look at the batch that gave them"


def values_of(gradients: Gradients, parameter: nn.Parameter) -> torch.Tensor:
    """Return the numbers of a gradient; of a sparse one those that are stored, each row once."""
    gradient = gradients[parameter]
    if not gradient.is_sparse:
        return gradient
    gradients[parameter] = gradient.coalesce()
    return gradients[parameter]._values()


def all_finite(gradients: Gradients) -> bool:
    """Return whether all gradients are finite.

    A sum is finite only if all its parts are, and is the fastest test. An infinite one may be an overflow of the sum
    itself, so each number is then tested.
    """
    sums: dict[torch.device, list[torch.Tensor]] = {}
    small: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in gradients:
        values = values_of(gradients, parameter)
        if values.numel() <= SMALL and values.dtype in _ADDED:
            small.setdefault((values.device, values.dtype), []).append(values)
        else:
            sums.setdefault(values.device, []).append(values.sum())
    for (device, _), few in small.items():
        sums.setdefault(device, []).append(torch._C._nn.flatten_dense_tensors(few).sum())
    if all(_finite(few) for few in sums.values()):
        return True
    return all(bool(torch.isfinite(values_of(gradients, parameter)).all()) for parameter in gradients)


SMALL = 8192  # numbers; a call for each smaller tensor takes longer than to copy all of them and add them up together
_ADDED = (torch.float32, torch.float64)  # of which a sum over many tensors is not soon too large


def _finite(sums: list[torch.Tensor]) -> bool:
    """Whether all sums on one device are finite; an accelerator is asked once."""
    if sums[0].device.type == "cpu":
        return all(cmath.isfinite(one.item()) for one in sums)
    return bool(torch.isfinite(torch.stack(sums)).all())


def gradient_fault(gradients: Gradients, names: Mapping[nn.Parameter, str], stage: int) -> Fault:
    """Return a description of a stage's first gradient that is not finite, or an empty one."""
    if all_finite(gradients):
        return {}
    bad = {}
    for parameter in gradients:
        values = values_of(gradients, parameter)
        odd = values[~torch.isfinite(values)]
        if odd.numel():
            bad[names[parameter]] = (odd, values.numel())
    name, (odd, count) = next(iter(bad.items()))
    kind = "nan" if bool(torch.isnan(odd).any()) else "inf"
    return {"stage": stage, "value": kind, "name": name, "bad": odd.numel(), "of": count, "others": len(bad) - 1}


def rate_fault(optimizer: torch.optim.Optimizer, stage: int) -> Fault:
    """Return a description of a learning rate that is not finite, as a scheduler may make one, or an empty one."""
    for group in optimizer.param_groups:
        rate = group.get("lr", 0.0)
        if isinstance(rate, (int, float)) and not isfinite(rate):
            return {"stage": stage, "rate": str(rate)}
    return {}


def refusal(faults: Sequence[Fault], step: int, norm: float | None = None) -> InputError:
    """Return the error that all ranks raise for the faults they have exchanged."""
    fault = next((fault for fault in faults if fault), None)
    if fault is None:
        return InputError("finite gradients", f"a norm of {norm} of all of them at step {step}", ADVICE)
    where = f"of stage {fault['stage']} at step {step}"
    if "rate" in fault:
        advice = "nothing of this update was applied: correct lr, or the LR scheduler"
        return InputError("a finite learning rate", f"{fault['rate']} in the optimizer {where}", advice)
    came = f"{fault['value']} in {fault['bad']} of {fault['of']} numbers of the gradient of {fault['name']} {where}"
    others = fault["others"] + sum(1 + other["others"] for other in faults if other is not fault and "others" in other)
    more = f", and in the gradients of {others} other parameters" if others else ""
    return InputError("finite gradients", came + more, ADVICE)


def require_finite_settings(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer with a NaN setting, or an infinite one that must be finite; torch accepts some of them."""
    for group in (optimizer.defaults, *optimizer.param_groups):
        for name, value in group.items():
            for number in value if isinstance(value, (tuple, list)) else (value,):
                if not isinstance(number, float):
                    continue
                if number != number or (name in _FINITE and not isfinite(number)):
                    kind = type(optimizer).__name__
                    raise InputError(f"a finite {name} of {kind}", number, f"correct {name} of the optimizer")


_FINITE = frozenset(
    ("lr", "initial_lr", "weight_decay", "momentum", "dampening", "betas", "eps", "alpha", "rho", "lambd", "lr_decay",
     "momentum_decay", "max_lr", "base_momentum", "etas")
)  # fmt: skip
