"""Optimizers beside torch's own, and the table by which a config names them.

Muon orthogonalises its step whatever the gradient's scale, so it tolerates a gradient that is one update old; AdamW
updates the parameters that are not matrices of hidden layers. Nesterov look-ahead (Ajanthan et al. 2025) is NAdam with
a long momentum: a stashed gradient is the older the farther its stage is from the last, and the step looks ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.core.arguments import named

if TYPE_CHECKING:
    from torch.optim import NAdam

Choice = Callable[[str, nn.Parameter], bool]
TABLES = ("emb", "wte", "wpe", "tok", "pos", "place", "head")  # parts of the names that tables and heads go by


def hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return True for a matrix whose name is not that of an embedding table or a head."""
    return parameter.ndim == 2 and not any(word in name.lower() for word in TABLES)


class Muon(torch.optim.Optimizer):
    """Groups with `muon` set are stepped by `torch.optim.Muon`, the others by `torch.optim.AdamW`; one state for all.

    Its learning rate is that of an AdamW step of the same size, so one rate serves both.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        names: Sequence[str] | None = None,
        matrices: Choice = hidden_matrix,
    ) -> None:
        named = _named(params, names)
        groups: list[dict[str, Any]] = []
        for flag in (True, False):
            part = [parameter for name, parameter in named if matrices(name, parameter) is flag]
            if part:
                one = _muon(part, lr, weight_decay, momentum) if flag else _adamw(part, lr, weight_decay, betas)
                groups += [{**group, "muon": flag} for group in one.param_groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "muon" not in param_group:
            raise ValueError("expected a group made by this optimizer; give all parameters when it is made")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update once, by two optimizers that share this one's groups and state, which a load or a copy replaces."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for flag, one in self._kinds().items():
            one.param_groups = [group for group in self.param_groups if group["muon"] is flag]
            one.state = self.state
            one.step()
        return loss

    def _kinds(self) -> dict[bool, torch.optim.Optimizer]:
        kinds: dict[bool, torch.optim.Optimizer] = self.__dict__.setdefault("kinds", {})
        if not kinds:  # new, or copied
            for group in self.param_groups:
                if group["muon"] not in kinds:
                    kinds[group["muon"]] = (_muon if group["muon"] else _adamw)(group["params"])
        return kinds


def _muon(
    params: list[nn.Parameter], lr: float = 1e-3, weight_decay: float = 0.01, momentum: float = 0.95
) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")


def _adamw(
    params: list[nn.Parameter], lr: float = 1e-3, weight_decay: float = 0.01, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr, betas, weight_decay=weight_decay)


def _named(params: Iterable[Any], names: Sequence[str] | None) -> list[tuple[str, nn.Parameter]]:
    given = list(params)
    if given and all(isinstance(one, tuple) for one in given):
        return given
    if not all(isinstance(one, torch.Tensor) for one in given):
        raise ValueError("expected a list of parameters, with or without their names, but got groups; give matrices=")
    return list(zip([""] * len(given) if names is None else names, given, strict=True))


@named
def muon(
    lr: float,
    *,
    weight_decay: float = 0.01,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.999),
    matrices: Choice = hidden_matrix,
) -> Callable[[Sequence[str], Any], Muon]:
    """Return a function for `Pipeline(..., schedule="2bw", optimizer=penstock.muon(lr=3e-3))`."""
    return lambda names, params: Muon(params, lr, weight_decay, momentum, betas, names, matrices)


def look_ahead(
    params: Any,
    lr: float = 2e-3,
    betas: tuple[float, float] = (0.99, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
) -> NAdam:
    """Return the optimizer itself; its weight decay is decoupled from the gradients, as AdamW's is."""
    from torch.optim import NAdam

    return NAdam(params, lr, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay=True)


@named
def nesterov(
    lr: float,
    betas: tuple[float, float] = (0.99, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
) -> Callable[[Any], NAdam]:
    """Return a function for `Pipeline(..., schedule="pipedream", optimizer=penstock.nesterov(lr=3e-4))`."""
    return lambda params: look_ahead(params, lr, betas, eps, weight_decay, momentum_decay)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"muon": Muon, "nesterov": look_ahead}
NOT_IN_FILES = frozenset(("names", "matrices"))  # arguments that no file can give


def takes_names(name: str) -> bool:
    """Return whether an optimizer of the table decides by the parameters' names."""
    return name in OPTIMIZERS and "names" in signature(OPTIMIZERS[name]).parameters
