"""The state that the modules of one model keep between forwards: buffers, and whatever else a forward changes on them.

A failed step leaves it unchanged. A forward that runs a second time, to recompute, has the state of the first time and
does not change the current one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from penstock.model.state import Copies, Saved, State


class Buffers:
    """The state of all modules, and of some of them."""

    def __init__(self, model: nn.Module) -> None:
        self.copies = Copies()
        self.whole = State(model.modules(), self.copies)

    def within(self, modules: Iterable[nn.Module], more: Iterable[Any] = ()) -> State:
        """Return the state of some modules, and of generators that belong to no module."""
        return State(modules, self.copies, more)

    def save(self) -> Saved:
        return self.whole.save()

    def learn(self, before: Saved) -> None:
        """Note, after a step, which large tensors it has not changed: of these no copy is kept."""
        self.copies.settle(before)

    def restore(self, before: Saved) -> None:
        """Undo every change since `before`."""
        lost = self.whole.changed(before)
        self.whole.restore(before)
        if lost:
            warnings.warn(
                "expected large tensors that a forward changes to do so from the first step on, but got one of shape "
                f"{tuple(lost[0].shape)} that began in a step that failed; it could not be put back",
                stacklevel=3,
            )


__all__ = ["Buffers", "Saved"]
