"""Staleness mitigation: the options of asynchronous training that correct for old weights.

- `t1=K`: PipeMare's learning rates: a stage's is divided by tau ** p, p falling from 1 to 0 over the first K updates.
- `t2=D` (or True for D = exp(-2)): PipeMare's backward weights, corrected towards those of the forward. Needs a
  schedule whose backward uses the newest weights.
- `t3=N`: the first N mini-batches are trained synchronously.
- `predict="xpipe"` or `"spectrain"`: forwards run on a forecast of the weights that their update will be applied to, by
  the optimizer's last step or by its momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from math import exp
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.lowered_loop import LoweredLoop
from penstock.core.shape import Law, Shape
from penstock.engine.weights.select import Foreseen
from penstock.errors import InputError
from penstock.schedules.registry import find

USUAL_DECAY = exp(-2)
NAMES = ("t1", "t2", "t3", "predict")
FORECASTS = ("xpipe", "spectrain")


@dataclass(frozen=True)
class MitigationOptions:
    """Staleness mitigation that was chosen; None or 0 for none."""

    t1: int | None = None
    t2: float | None = None
    t3: int = 0
    predict: str | None = None

    def rate(self, endless: LoweredLoop, stage: int, step: int) -> float:
        """Return T1's factor for a stage's learning rate at an update."""
        if self.t1 is None:
            return 1.0
        share = 1 - min(max(step - self.t3, 0) / self.t1, 1)
        return float(max(endless.delay(stage), 1.0) ** -share)


def without_mitigation(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the schedule's method alone."""
    return {name: value for name, value in options.items() if name not in NAMES}


def require_known(name: str, options: dict[str, Any]) -> None:
    """Raise for an option that neither the asynchronous method nor staleness mitigation has."""
    method = find(name)
    valid = [*method.options, *NAMES]
    unknown = [option for option in options if option not in valid]
    if method.asynchronous and unknown:
        near = get_close_matches(unknown[0], valid, n=1)
        advice = f"try {near[0]}" if near else "leave it out"
        raise InputError(f"options that {name} has ({', '.join(valid)})", ", ".join(unknown), advice)


def read_mitigation(options: dict[str, Any], shape: Shape) -> MitigationOptions:
    """Return the staleness mitigation among a schedule's options. pipemare has T2 unless t2=False."""
    given = {name: options[name] for name in NAMES if name in options}
    if shape.law is Law.SYNC:
        if given:
            raise InputError(
                f"an asynchronous schedule for {', '.join(given)}",
                repr(shape.name),
                "leave it out, or choose pipedream",
            )
        return MitigationOptions()
    return MitigationOptions(
        _count("t1", "K of T1, updates over which learning rates rise", given.get("t1"), 1),
        _decay(given.get("t2", shape.name == "pipemare"), shape.law),
        _count("t3", "mini-batches to be trained synchronously first", given.get("t3"), 0) or 0,
        _forecast(given.get("predict")),
    )


def _count(name: str, what: str, value: Any, least: int) -> int | None:
    if value is None or value is False:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} to be a whole number of at least {least} ({what})", repr(value), f"correct {name}")
    return value


def _decay(value: Any, law: Law) -> float | None:
    if value is None or value is False:
        return None
    if law is not Law.NEWEST:
        raise InputError(
            "t2 with a schedule whose backward takes the newest weights", f"the law {law.value!r}", "use pipemare"
        )
    value = USUAL_DECAY if value is True else value
    if not isinstance(value, (int, float)) or not 0 < value < 1:
        raise InputError("t2 to be True, or a decay D between 0 and 1", repr(value), "correct t2")
    return float(value)


def _forecast(value: Any) -> str | None:
    if value is not None and value not in FORECASTS:
        raise InputError(f"predict to be one of {', '.join(FORECASTS)}", repr(value), "choose one, or leave it out")
    return value  # type: ignore[no-any-return]


def momentum_steps(optimizers: dict[int, torch.optim.Optimizer]) -> Foreseen:
    """Return SpecTrain's forecast: the step that an optimizer's momentum would take."""
    for optimizer in optimizers.values():
        if not all(group.get("momentum") or "betas" in group for group in optimizer.param_groups):
            raise _no_momentum(optimizer, "none")
        if any("ns_steps" in group for group in optimizer.param_groups):  # Muon does not step along its momentum
            raise _no_momentum(optimizer, "one that it makes orthogonal first")

    def foreseen(stage: int, weights: list[nn.Parameter]) -> list[Tensor]:
        if not weights:
            return []
        optimizer = optimizers[stage]
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        return [_step(optimizer, groups.get(weight, {}), weight) for weight in weights]

    return foreseen


def _step(optimizer: torch.optim.Optimizer, group: dict[str, Any], weight: nn.Parameter) -> Tensor:
    kept = optimizer.state.get(weight, {})
    if not kept:  # no gradient yet, or not one of the optimizer's parameters
        return torch.zeros_like(weight)
    if kept.get("momentum_buffer") is not None:
        return kept["momentum_buffer"] * -group["lr"]  # type: ignore[no-any-return]
    if "exp_avg" in kept and "exp_avg_sq" in kept:
        first, second = group["betas"]
        count = float(kept["step"])
        mean, square = kept["exp_avg"] / (1 - first**count), kept["exp_avg_sq"] / (1 - second**count)
        return mean / (square.sqrt() + group["eps"]) * -group["lr"]  # type: ignore[no-any-return]
    raise _no_momentum(optimizer, ", ".join(map(str, kept)))


def _no_momentum(optimizer: torch.optim.Optimizer, kept: str) -> InputError:
    return InputError(
        "an optimizer that keeps a momentum, for predict='spectrain'",
        f"{type(optimizer).__name__} with {kept}",
        "use momentum, Adam, or predict='xpipe'",
    )
