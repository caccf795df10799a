"""The slots that a sender copies its messages into: pieces of one shared file, used again as soon as they are free.

The slot that became free last is taken first, because its memory is warm. When none fits, there is one more, so a
sender never waits for its receiver and the memory is that of what is in flight.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

import torch

from penstock.engine.transport import memory
from penstock.engine.transport.ring import SLOTS
from penstock.engine.transport.wire import Layout, views

IDLE = 256  # a free slot that as many messages did not want is given up when memory is asked for
PAGE = 4096


@dataclass(eq=False, slots=True)
class Slot:
    number: int
    place: tuple[int, int]  # offset in the file, and size
    piece: memoryview
    address: int
    used: int = 0  # when: messages of the lane before
    laid: Layout | None = None
    _targets: list[torch.Tensor] = field(default_factory=list)

    def targets(self, layout: Layout) -> list[torch.Tensor]:
        """Tensors in this slot to copy to, those of the last message where they are alike."""
        if self.laid is not layout:
            with torch.inference_mode(False):  # else they could not be written to outside of it
                self._targets, self.laid = list(views(layout, self.piece).values()), layout
        return self._targets


def rounded(size: int) -> int:
    """Up to a multiple of pages that is within a hundredth, so that messages of nearly one size share slots."""
    step = max(PAGE, 1 << max(0, size.bit_length() - 8))
    return max(1, -(-size // step)) * step


class Slots:
    """`bytes` is the size of all slots, free or not. The first `begin` bytes of the file are somebody else's."""

    def __init__(self, file: int, begin: int) -> None:
        self.bytes = 0
        self._file, self._end = file, -(-begin // PAGE) * PAGE
        self._every: dict[int, Slot] = {}
        self._free: dict[int, list[Slot]] = {}  # by size
        self._numbers: list[int] = []  # of slots given up
        self._count = 0

    def take(self, size: int) -> Slot:
        """A slot of at least that size, which is a rounded one; OSError where there is no memory for it."""
        self._count += 1
        free = self._free.get(size)
        slot = free.pop() if free else self._larger(size) or self._another(size)
        slot.used = self._count
        return slot

    def give(self, number: int) -> None:
        slot = self._every[number]
        self._free[slot.place[1]].append(slot)

    def drop(self) -> None:
        """Let go of all, for good."""
        self._every.clear()
        self._free.clear()
        self.bytes = 0

    def _larger(self, size: int) -> Slot | None:
        """A free slot of up to twice that size."""
        fitting = [other for other, free in self._free.items() if free and size <= other <= 2 * size]
        return self._free[min(fitting)].pop() if fitting else None

    def _another(self, size: int) -> Slot:
        self._give_up(self._count - IDLE)
        try:
            return self._new(size)
        except OSError:
            self._give_up(self._count)
            return self._new(size)

    def _new(self, size: int) -> Slot:
        if len(self._every) == SLOTS:
            raise OSError(errno.ENOSPC, f"the receiver holds tensors of {SLOTS} messages of one lane")
        memory.allocate(self._file, self._end, size)
        piece = memory.map_piece(self._file, self._end, size)
        number = self._numbers.pop() if self._numbers else len(self._every)
        slot = self._every[number] = Slot(number, (self._end, size), piece, memory.address_of(piece))
        self._free.setdefault(size, [])
        self._end += size
        self.bytes += size
        return slot

    def _give_up(self, before: int) -> None:
        """Free slots that were used last before that message."""
        for size, free in self._free.items():
            for slot in [slot for slot in free if slot.used < before]:
                memory.free(self._file, *slot.place)
                free.remove(slot)
                del self._every[slot.number]
                self._numbers.append(slot.number)
                self.bytes -= size
