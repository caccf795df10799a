"""Step an optimizer and its LR scheduler; errors that torch raises only then become one clear message."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from penstock.errors import InputError


def update(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer by the gradients in `.grad`."""
    try:
        optimizer.step()
    except RuntimeError as error:
        kind = re.search("(sparse|dense) gradients", str(error))
        if kind is None:
            raise
        expected, came = f"gradients that {type(optimizer).__name__} takes", f"{kind[1]} ones ({error})"
        raise InputError(expected, came, "use another optimizer") from error


def advance(scheduler: Any, loss: float) -> None:
    """Step an LR scheduler to the rate of the next update."""
    try:
        scheduler.step(loss) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
    except ValueError as error:
        if not str(error).startswith("Tried to step"):
            raise
        came = f"a {type(scheduler).__name__} that has come to its end ({error})"
        advice = "give it as many total_steps as there are updates, or train fewer"
        raise InputError("an LR scheduler that lasts as long as the training", came, advice) from error
