"""The versions of some weights that change together: buffers, of which `.data` shows one at a time.

A new version goes into a buffer of its own while anybody still needs the old one, so nothing that a live forward holds
is ever overwritten. Buffers that nobody needs any more are used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Key(NamedTuple):
    """A version; or, `ahead` updates further on, what was forecast from it."""

    version: int
    ahead: int = 0


class Versions:
    """Starts with one version, 0: what the parameters hold."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.newest = 0
        self.shown = Key(0)
        self.data: dict[Key, list[Tensor]] = {self.shown: [p.data for p in self.parameters]}
        self.uses: Counter[Key] = Counter()
        self.spare: list[list[Tensor]] = []

    def show(self, key: Key) -> None:
        """Let `.data` be that version's."""
        if key != self.shown:
            self.show_these(self.data[key])
            self.shown = key

    def show_these(self, tensors: list[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def show_newest(self) -> None:
        self.show(Key(self.newest))

    def hold(self, key: Key) -> None:
        """A forward has run on it, and its backward will come."""
        self.uses[key] += 1

    def release(self, key: Key) -> None:
        self.uses[key] -= 1

    def trim(self, oldest: int) -> None:
        """Let go of what no live forward holds, and no coming one will name: they name `oldest` or later ones."""
        for key in [key for key in self.data if key.version < oldest and not self.uses[key]]:
            if key != Key(self.newest):
                if key == self.shown:
                    self.show_newest()
                self.spare.append(self.data.pop(key))
                del self.uses[key]

    def advance(self, oldest: int) -> None:
        """A new version, at first equal to the newest; that remains if live forwards hold it or coming ones name it."""
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

    def take_in(self) -> None:
        """After an update: an optimizer may have put tensors of its own in the place of those that are shown."""
        for parameter, mine in zip(self.parameters, self.data[self.shown], strict=True):
            if parameter.data_ptr() != mine.data_ptr():
                mine.copy_(parameter.detach())
                parameter.data = mine

    def forecast(self, key: Key, steps: list[Tensor]) -> None:
        """Make what `steps`, taken `key.ahead` times, would make of a version, unless it is there."""
        if key not in self.data:
            made = self._copy(self.data[Key(key.version)])
            if made:
                torch._foreach_add_(made, steps, alpha=key.ahead)
            self.data[key] = made

    def restart(self) -> None:
        """The newest version, or what somebody has put in its place since, becomes version 0; nothing else may be in
        use."""
        self.show_newest()
        kept = [parameter.data for parameter in self.parameters]
        self.newest, self.shown, self.data, self.spare = 0, Key(0), {Key(0): kept}, []
        self.uses.clear()

    @property
    def bytes(self) -> int:
        """Of all buffers, spare ones included."""
        every = [*self.data.values(), *self.spare]
        return sum(tensor.numel() * tensor.element_size() for tensors in every for tensor in tensors)

    def _copy(self, tensors: list[Tensor]) -> list[Tensor]:
        made = self.spare.pop() if self.spare else [torch.empty_like(tensor) for tensor in tensors]
        if made:  # a stage may be without weights of its own
            torch._foreach_copy_(made, tensors)
        return made
