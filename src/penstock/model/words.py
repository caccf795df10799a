"""What goes along with a micro-batch's tensors in training without a flush, so that nobody has to meet for it.

Down, with its forward: the norm that a round's gradients have been found to have, and overflows. Up, with its backward:
its loss, the scale of its gradients, and what the round's gradients add to the norm so far.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_DOWN, _UP = struct.Struct("<2d"), struct.Struct("<4d")


@dataclass
class Words:
    """Of one micro-batch. A norm that nobody has asked for is negative."""

    agreed: float = -1.0  # the norm of all gradients of the round whose version this micro-batch is the first to use
    overflow: float = 0.0  # the scale under which some stage's gradients have overflowed since it last said so
    total: float = 0.0  # its loss, as a sum
    weight: float = 0.0  # and what that is divided by
    scale: float = 1.0
    squares: float = 0.0  # of the gradients of all stages that the backward has passed, of its mini-batch

    def down(self) -> bytes:
        return _DOWN.pack(self.agreed, self.overflow)

    def heard_down(self, told: bytes) -> bytes:
        """Take it in; returns what else was told."""
        self.agreed, self.overflow = _DOWN.unpack_from(told)
        return told[_DOWN.size :]

    def up(self) -> bytes:
        return _UP.pack(self.total, self.weight, self.scale, self.squares)

    def heard_up(self, told: bytes) -> None:
        self.total, self.weight, self.scale, self.squares = _UP.unpack_from(told)
