"""The user's random states: what a script that shuffles or augments draws from. Stages seed for themselves."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from penstock.app.plain_values import read, written


def random_states(device: torch.device) -> Any:
    """As JSON takes it."""
    states: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return written(states, "the random states")


def require_random_states(states: dict[str, Any]) -> None:
    """Refuse states that a generator does not take: ones that nobody draws from are given them."""
    torch.Generator().set_state(states["torch"])
    random.Random().setstate(states["python"])
    np.random.RandomState().set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.Generator("cuda").set_state(states["cuda"])


def set_random_states(told: Any, device: torch.device) -> None:
    states = read(told)
    torch.default_generator.set_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
