"""Facts that accompany a micro-batch's tensors in training without a flush, so that no collective is needed.

With its forward: the gradient norm of a mini-batch, and overflows. With its backward: its loss, the scale of its
gradients, and the sum of squares of the gradients so far.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

_DOWN, _UP, _LOSS = struct.Struct("<2d"), struct.Struct("<2d"), struct.Struct("<i2d")


@dataclass
class Words:
    """The facts of one micro-batch. A negative norm means that there is none."""

    agreed: float = -1.0  # norm of all gradients of the mini-batch whose version this micro-batch uses first
    overflow: float = 0.0  # the scale under which some stage's gradients have overflowed since its last report
    # Sum of its loss and divisor of the sum, by the replica of the last stage where replicas divide its rows.
    losses: dict[int, tuple[float, float]] = field(default_factory=dict)
    scale: float = 1.0
    squares: float = 0.0  # sum of squares of its mini-batch's gradients on all stages that the backward has passed

    def down(self) -> bytes:
        return _DOWN.pack(self.agreed, self.overflow)

    def heard_down(self, told: bytes) -> bytes:
        """Read the facts of a forward, and return the rest of the bytes."""
        self.agreed, self.overflow = _DOWN.unpack_from(told)
        return told[_DOWN.size :]

    def up(self) -> bytes:
        losses = (_LOSS.pack(replica, *loss) for replica, loss in self.losses.items())
        return b"".join((_UP.pack(self.scale, self.squares), *losses))

    def heard_up(self, told: bytes) -> None:
        """Read the facts of a backward; those of another replica are added to them."""
        self.scale, self.squares = _UP.unpack_from(told)
        for replica, total, weight in _LOSS.iter_unpack(told[_UP.size :]):
            self.losses[replica] = total, weight
