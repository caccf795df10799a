"""The memory of a lane between two processes of one host: a ring of descriptors, and slots for tensors.

    mark | semaphore | sent | taken | closed | descriptors ... | free slots ...

The sender writes a descriptor, increments `sent` and posts the semaphore. The receiver increments `taken`, and writes
the number of a slot back when it is free. Slots are pieces of one shared file. The slot that was freed last is used
first, because its memory is in the cache; when none fits, one is added, so a sender never waits for a slot.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass, field

import torch

from penstock.comm.transport.shared import mapping
from penstock.comm.transport.shared.mapping import Semaphore
from penstock.comm.transport.wire import MessageLayout, views

ENTRIES = 4096  # messages that can wait for the receiver
SLOTS = 1 << 14
ELSEWHERE = 0xFFFFFFFF  # as a slot: the message was sent over another lane

MARK = 16  # random bytes of each lane, by which the receiver recognizes the right memory
_LINE = 64  # a cache line for each counter, because different processes write them
_FIRST = 4096
# run, micro-batch, stamp; the slot's place and size in the file, bytes of tensors in it; number of the slot, number of
# the layout, bytes of metadata, bytes of the layout (0: sent before). Metadata follow the tensors, then the layout.
_ENTRY = struct.Struct("<qqQQQQIIII")
ENTRY_BYTES = _ENTRY.size
pack_entry = _ENTRY.pack_into
RING_BYTES = _FIRST + ENTRIES * ENTRY_BYTES + SLOTS * 4


class Ring:
    """One end's view of the ring. Every counter has one writer, and only grows."""

    def __init__(self, piece: memoryview, mark: bytes | None = None) -> None:
        """With a mark, this end creates the ring."""
        if mark is not None:
            piece[:MARK] = mark
        self.mark = bytes(piece[:MARK])
        self.semaphore = arrivals = Semaphore(piece[_LINE : _LINE + mapping.BYTES], create=mark is not None)
        self.sent, self.taken, self.closed = (piece[i * _LINE : i * _LINE + 8].cast("Q") for i in (2, 3, 4))
        self.post, self.try_take = arrivals.post, arrivals.try_take
        self.count = 0  # descriptors that this end has written or read
        last = _FIRST + ENTRIES * ENTRY_BYTES
        self.entries = piece[_FIRST:last]
        self.free = piece[last : last + SLOTS * 4].cast("I")

    def write(self, *entry: int) -> None:
        """Write the next descriptor, which needs room in the ring."""
        pack_entry(self.entries, self.count % ENTRIES * ENTRY_BYTES, *entry)
        self.publish()

    def publish(self) -> None:
        """Publish a descriptor that was packed in its place."""
        self.count = self.sent[0] = self.count + 1
        self.post()

    def read(self) -> tuple[int, ...]:
        """Return the next descriptor. Take a post of the semaphore first."""
        count = self.count
        entry = _ENTRY.unpack_from(self.entries, count % ENTRIES * ENTRY_BYTES)
        self.count = self.taken[0] = count + 1
        return entry


IDLE = 256  # messages: a free slot unused for longer is freed before a new slot is allocated
PAGE = 4096


@dataclass(eq=False, slots=True)
class TensorSlot:
    """A slot: a piece of the shared file for the tensors of one message."""

    number: int
    place: tuple[int, int]  # offset in the file, and size
    piece: memoryview
    address: int
    used: int = 0  # number of the message that used it last
    laid: MessageLayout | None = None
    _targets: list[torch.Tensor] = field(default_factory=list)

    def targets(self, layout: MessageLayout) -> list[torch.Tensor]:
        """Return tensors in this slot to copy to, reused while messages have the same layout."""
        if self.laid is not layout:
            with torch.inference_mode(False):  # inference tensors could not be written to outside of inference mode
                self._targets, self.laid = list(views(layout, self.piece).values()), layout
        return self._targets


def rounded(size: int) -> int:
    """Return the size rounded up to whole pages by at most one percent, so that messages of similar size share
    slots."""
    step = max(PAGE, 1 << max(0, size.bit_length() - 8))
    return max(1, -(-size // step)) * step


class Slots:
    """All slots of a lane. `bytes` is their size, free or not. The first `begin` bytes of the file are reserved."""

    def __init__(self, file: int, begin: int) -> None:
        self.bytes = 0
        self._file, self._end = file, -(-begin // PAGE) * PAGE
        self._every: dict[int, TensorSlot] = {}
        self._free: dict[int, list[TensorSlot]] = {}  # by size
        self._numbers: list[int] = []  # numbers of freed slots, to be reused
        self._count = 0

    def take(self, size: int) -> TensorSlot:
        """Return a free slot of at least that size, which must be rounded; raise OSError where there is no memory for
        it."""
        self._count += 1
        free = self._free.get(size)
        slot = free.pop() if free else self._larger(size) or self._another(size)
        slot.used = self._count
        return slot

    def give(self, number: int) -> None:
        """Mark a slot as free."""
        slot = self._every[number]
        self._free[slot.place[1]].append(slot)

    def drop(self) -> None:
        """Release all slots for good."""
        self._every.clear()
        self._free.clear()
        self.bytes = 0

    def _larger(self, size: int) -> TensorSlot | None:
        """Return a free slot of up to twice that size; None if there is none."""
        fitting = [other for other, free in self._free.items() if free and size <= other <= 2 * size]
        return self._free[min(fitting)].pop() if fitting else None

    def _another(self, size: int) -> TensorSlot:
        """Add a slot. Free the memory of unused slots before, and of all free ones if there is no memory."""
        self._give_up(self._count - IDLE)
        try:
            return self._new(size)
        except OSError:
            self._give_up(self._count)
            return self._new(size)

    def _new(self, size: int) -> TensorSlot:
        if len(self._every) == SLOTS:
            raise OSError(errno.ENOSPC, f"the receiver holds tensors of {SLOTS} messages of one lane")
        mapping.allocate(self._file, self._end, size)
        piece = mapping.map_piece(self._file, self._end, size)
        number = self._numbers.pop() if self._numbers else len(self._every)
        slot = self._every[number] = TensorSlot(number, (self._end, size), piece, mapping.address_of(piece))
        self._free.setdefault(size, [])
        self._end += size
        self.bytes += size
        return slot

    def _give_up(self, before: int) -> None:
        """Free the memory of free slots that were last used before that message."""
        for size, free in self._free.items():
            for slot in [slot for slot in free if slot.used < before]:
                mapping.free(self._file, *slot.place)
                free.remove(slot)
                del self._every[slot.number]
                self._numbers.append(slot.number)
                self.bytes -= size
