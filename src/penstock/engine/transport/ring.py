"""The first piece of a shared lane's memory: descriptors of messages one way, numbers of free slots the other.

    mark | semaphore | sent | taken | closed | descriptors ... | free slots ...

The sender writes a descriptor, counts it in `sent` and posts the semaphore, which also orders its writes before the
receiver's reads. The receiver writes the number of a slot, plus one, where the next free slot belongs; the sender sets
it back to zero. That needs no order of its own: whoever frees the last tensor of a message has just counted down a
reference atomically, and the sender writes to a slot only because of what it read here.
"""

from __future__ import annotations

import struct

from penstock.engine.transport import semaphore
from penstock.engine.transport.semaphore import Semaphore

ENTRIES = 4096  # messages that can wait for the receiver
SLOTS = 1 << 14
ELSEWHERE = 0xFFFFFFFF  # the slot of a message that comes by another lane

MARK = 16  # bytes, drawn anew for every lane: whoever opens the memory knows that it is the right one
_LINE = 64  # a cache line each, because different processes write them
_FIRST = 4096
# run, micro-batch, stamp; the slot's place and size in the file, bytes of tensors in it; number of the slot, number of
# the layout, bytes of told, bytes of the layout (0: it came before). Told lies behind the tensors, then the layout.
_ENTRY = struct.Struct("<qqQQQQIIII")
ENTRY_BYTES = _ENTRY.size
pack_entry = _ENTRY.pack_into
RING_BYTES = _FIRST + ENTRIES * ENTRY_BYTES + SLOTS * 4


class Ring:
    """One end's view of it. All counts are of one writer, and only grow."""

    def __init__(self, piece: memoryview, mark: bytes | None = None) -> None:
        """With a mark, this end creates."""
        if mark is not None:
            piece[:MARK] = mark
        self.mark = bytes(piece[:MARK])
        self.semaphore = arrivals = Semaphore(piece[_LINE : _LINE + semaphore.BYTES], create=mark is not None)
        self.sent, self.taken, self.closed = (piece[i * _LINE : i * _LINE + 8].cast("Q") for i in (2, 3, 4))
        self.post, self.try_take = arrivals.post, arrivals.try_take
        self.count = 0  # of descriptors that this end has written or read
        last = _FIRST + ENTRIES * ENTRY_BYTES
        self.entries = piece[_FIRST:last]
        self.free = piece[last : last + SLOTS * 4].cast("I")

    def write(self, *entry: int) -> None:
        """The next descriptor, where the ring is not full."""
        pack_entry(self.entries, self.count % ENTRIES * ENTRY_BYTES, *entry)
        self.publish()

    def publish(self) -> None:
        """A descriptor that was packed in its place."""
        self.count = self.sent[0] = self.count + 1
        self.post()

    def read(self) -> tuple[int, ...]:
        """The next descriptor; only after a post of the semaphore was taken."""
        count = self.count
        entry = _ENTRY.unpack_from(self.entries, count % ENTRIES * ENTRY_BYTES)
        self.count = self.taken[0] = count + 1
        return entry
