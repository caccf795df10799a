"""Buffers that a forward changes: counters, moving averages, the vectors of a spectral norm.

A step that fails leaves them as they were, and a forward that runs a second time, to recompute, sees what it saw the
first time and leaves no trace. Few models have any. The first step keeps all buffers; later ones those seen to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

Place = tuple[nn.Module, str]
Saved = list[tuple[Place, torch.Tensor, int, torch.Tensor | None]]  # where, the buffer, its version, its values


class Buffers:
    """The buffers of one model."""

    def __init__(self, model: nn.Module) -> None:
        modules = {id(module): module for module in model.modules()}.values()
        self.places = [(m, key) for m in modules for key, buffer in m._buffers.items() if buffer is not None]
        self.changing = set(range(len(self.places)))  # until a step has shown which
        self.learnt = False

    def save(self) -> Saved:
        """What they hold now; values only of those that are known to change."""
        return [
            (place, buffer, buffer._version, buffer.detach().clone() if at in self.changing else None)
            for at, place in enumerate(self.places)
            if (buffer := _at(place)) is not None
        ]

    def learn(self, before: Saved) -> None:
        """See which have changed since."""
        changed = {at for at, (place, buffer, version, _) in enumerate(before) if _changed(place, buffer, version)}
        self.changing = self.changing | changed if self.learnt else changed
        self.learnt = True

    @contextmanager
    def as_they_were(self, before: Saved) -> Iterator[None]:
        """Run something with old values, and put today's back."""
        today = [(place, _at(place)) for place, _, _, values in before if values is not None]
        for (module, key), _, _, values in before:
            if values is not None:
                module._buffers[key] = values.clone()
        try:
            yield
        finally:
            for (module, key), buffer in today:
                module._buffers[key] = buffer

    def restore(self, before: Saved) -> None:
        """Undo every change since."""
        with torch.no_grad():
            for (module, key), buffer, version, values in before:
                if values is not None and _changed((module, key), buffer, version):
                    buffer.copy_(values)
                    module._buffers[key] = buffer


def _at(place: Place) -> torch.Tensor | None:
    module, key = place
    return module._buffers.get(key)


def _changed(place: Place, buffer: torch.Tensor, version: int) -> bool:
    return _at(place) is not buffer or buffer._version != version
