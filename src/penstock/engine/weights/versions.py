"""The versions of weights that change together: buffers, one of which is shown in `.data` at a time.

A new version gets a buffer of its own while the old one is in use, so a version that a live forward holds is never
overwritten. Free buffers are reused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Key(NamedTuple):
    """A version, or a forecast from it, `ahead` updates further on."""

    version: int
    ahead: int = 0


class Versions:
    """The versions of some parameters, at first one, 0: the parameters' values."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.newest = 0
        self.shown = Key(0)
        self.data: dict[Key, list[Tensor]] = {self.shown: [p.data for p in self.parameters]}
        self.uses: Counter[Key] = Counter()
        self.spare: list[list[Tensor]] = []

    def show(self, key: Key) -> None:
        """Set `.data` to a version."""
        if key != self.shown:
            self.show_these(self.data[key])
            self.shown = key

    def show_these(self, tensors: list[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def show_newest(self) -> None:
        self.show(Key(self.newest))

    def hold(self, key: Key) -> None:
        """Keep a version for the backward of a forward that has run on it."""
        self.uses[key] += 1

    def release(self, key: Key) -> None:
        self.uses[key] -= 1

    def trim(self, oldest: int) -> None:
        """Free the versions that no live forward holds and no later one uses: those use `oldest` or later ones."""
        for key in [key for key in self.data if key.version < oldest and not self.uses[key]]:
            if key != Key(self.newest):
                if key == self.shown:
                    self.show_newest()
                self.spare.append(self.data.pop(key))
                del self.uses[key]

    def advance(self, oldest: int) -> None:
        """Add a version, at first equal to the newest. The old buffer is kept if live forwards hold it or later ones
        use it."""
        self.trim(oldest)
        before, after = Key(self.newest), Key(self.newest + 1)
        self.show(before)
        if self.uses[before] or self.newest >= oldest:
            self.data[after] = self._copy(self.data[before])
        else:
            self.data[after] = self.data.pop(before)
            del self.uses[before]
        self.newest += 1
        self.show(after)

    def copy_replaced(self) -> None:
        """Copy tensors that an optimizer has put in place of the shown ones back into the shown ones, after an
        update."""
        for parameter, tensor in zip(self.parameters, self.data[self.shown], strict=True):
            if parameter.data_ptr() != tensor.data_ptr():
                tensor.copy_(parameter.detach())
                parameter.data = tensor

    def forecast(self, key: Key, steps: list[Tensor]) -> None:
        """Compute the forecast of a version by adding `steps` `key.ahead` times, unless it exists."""
        if key not in self.data:
            forecast = self._copy(self.data[Key(key.version)])
            if forecast:
                torch._foreach_add_(forecast, steps, alpha=key.ahead)
            self.data[key] = forecast

    def restart(self) -> None:
        """Make the newest version, or what has replaced it since, version 0. No other version may be in use."""
        self.show_newest()
        kept = [parameter.data for parameter in self.parameters]
        self.newest, self.shown, self.data, self.spare = 0, Key(0), {Key(0): kept}, []
        self.uses.clear()

    @property
    def bytes(self) -> int:
        """Bytes of all buffers, free ones included."""
        every = [*self.data.values(), *self.spare]
        return sum(tensor.numel() * tensor.element_size() for tensors in every for tensor in tensors)

    def _copy(self, tensors: list[Tensor]) -> list[Tensor]:
        copies = self.spare.pop() if self.spare else [torch.empty_like(tensor) for tensor in tensors]
        if copies:  # a stage may have no weights of its own
            torch._foreach_copy_(copies, tensors)
        return copies
