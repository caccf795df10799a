"""Random numbers of a stage, which depend on (seed, step, stage, micro-batch) alone, so that order and recomputation do
not matter.

The generators of torch, Python and NumPy are all seeded: a layer that drops itself by `random.random()` must do the
same when its forward runs a second time.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MASK = 2**64 - 1
_HOST = 1  # distinguishes the host's generators from torch's, which are seeded by the same numbers


def mixed(*numbers: int) -> int:
    """Return one number of 64 bits from several, by rounds of splitmix64, so that similar inputs give unrelated
    results."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_all(number: int, device: torch.device) -> None:
    """Seed every generator that a stage may use.

    This does not call `torch.manual_seed`: where CUDA is not in use, that queues a call with its stack, which is a
    hundred times as slow.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        _on_device(device).manual_seed(number)
    _seed_host(number)


@contextmanager
def torch_seeded(number: int) -> Iterator[None]:
    """Seed torch's generators within the context, and restore their states afterwards."""
    before = draws()
    torch.default_generator.manual_seed(number)
    if len(before) > 1:
        _on_device(torch.device("cuda")).manual_seed(number)
    try:
        yield
    finally:
        set_draws(before)


class host_draws:
    """The states of Python's and NumPy's generators for code between a model's modules: seeded equally on all stages,
    so that all draw the same. Draws inside modules continue from their own states."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> host_draws:
        self.modules = _host_states()
        _seed_host(mixed(self.number, _HOST))
        self.start = _host_states()
        return self

    def __exit__(self, *_: object) -> None:
        _set_host_states(self.modules)

    @property
    def moved(self) -> bool:
        """Whether anything was drawn outside the modules."""
        (python, numpy), (python_before, numpy_before) = _host_states(), self.start
        return python != python_before or pickle.dumps(numpy) != pickle.dumps(
            numpy_before
        )  # as bytes: they hold arrays

    @contextmanager
    def in_module(self) -> Iterator[None]:
        """Run a module, with its own draws."""
        outside = _host_states()
        _set_host_states(self.modules)
        try:
            yield
        finally:
            self.modules = _host_states()
            _set_host_states(outside)


def _host_states() -> tuple[object, dict[str, Any]]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_host_states(states: tuple[object, dict[str, Any]]) -> None:
    random.setstate(states[0])  # type: ignore[arg-type]
    np.random.set_state(states[1])


def _seed_host(number: int) -> None:
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


def draws() -> list[torch.Tensor]:
    """Return torch's random states: a function that changes them must run on one stage only."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.random.get_rng_state(), *cuda]


def set_draws(states: list[torch.Tensor]) -> None:
    """Restore torch's random states."""
    torch.random.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


class random_states_kept:
    """A context that restores the user's random states after a step that seeds its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.cpu, self.python = torch.default_generator.get_state(), random.getstate()
        self.numpy = np.random.get_state(legacy=False)
        self.cuda = _on_device(self.device).get_state() if self.device.type == "cuda" else None

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self.cpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        if self.cuda is not None:
            _on_device(self.device).set_state(self.cuda)


def _on_device(device: torch.device) -> torch.Generator:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
