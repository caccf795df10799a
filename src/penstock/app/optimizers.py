"""Optimizers that a config may name, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

import torch

from penstock.app.muon import Muon
from penstock.app.nesterov import look_ahead

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"muon": Muon, "nesterov": look_ahead}
NOT_IN_FILES = frozenset(("names", "matrices"))  # arguments that no file can give


def takes_names(name: str) -> bool:
    """Whether it decides by the parameters' names."""
    return name in OPTIMIZERS and "names" in signature(OPTIMIZERS[name]).parameters
