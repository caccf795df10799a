"""The memory in which a rank of a group shows the others of its host what it has: semaphores, and slots for buckets.

    mark | semaphores: event, other rank ... | slot: digest, bucket | slot ...

A semaphore lies with the rank that waits for it, one for each event and each other rank, and is posted once a bucket:
so no rank reads memory before its writer is done with it, on any processor. The memory has no name in the file system:
the others open it through /proc, and when the last process that has it mapped ends, however it ends, it is free.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from enum import IntEnum

import torch
from torch import Tensor

from penstock.comm.transport.shared import mapping
from penstock.comm.transport.shared.mapping import Semaphore

BUCKET = 1 << 20  # bytes of tensors in a slot
SLOTS = 4  # a rank writes one bucket, adds the one before and takes the one before that; others may be one ahead
DIGEST = 64  # bytes before a bucket, for a digest
_MARK = 16
_LINE = 64
_PAGE = 4096


class Event(IntEnum):
    """Something that a rank tells another of a bucket."""

    WRITTEN = 0  # what the others need of my tensors is in my slot
    ADDED = 1  # my share of the sum is in my slot
    TAKEN = 2  # I need nothing more of your slot
    SPREAD = 3  # the sum over all hosts is in my slot


class Segment:
    """The memory of one rank, as that rank or another of its host sees it. `count`: ranks of the group on this host."""

    def __init__(self, piece: memoryview, count: int, mark: bytes | None = None) -> None:
        """With a mark, this rank creates."""
        head = _head(count)
        self._piece = piece
        if mark is not None:
            piece[:_MARK] = mark
        self.mark = bytes(piece[:_MARK])
        waits = len(Event) * count if count > 1 else 0
        rooms = [piece[_LINE * at :][: mapping.BYTES] for at in range(1, 1 + waits)]
        semaphores = [Semaphore(room, create=mark is not None) for room in rooms]
        self.semaphores = [semaphores[event * count : (event + 1) * count] for event in Event]
        self._places = [head + slot * (DIGEST + BUCKET) + DIGEST for slot in range(SLOTS)]
        self.addresses = [mapping.address_of(piece[place:]) for place in self._places]
        self._tensors: dict[tuple[int, torch.dtype], Tensor] = {}

    def digest(self, slot: int) -> memoryview:
        """The bytes before the bucket of a slot."""
        return self._piece[self._places[slot] - DIGEST : self._places[slot]]

    def bucket(self, slot: int, dtype: torch.dtype) -> Tensor:
        """The bucket of a slot, as elements."""
        if (slot, dtype) not in self._tensors:
            with torch.inference_mode(False):  # else it could not be written to outside of it
                self._tensors[slot, dtype] = torch.frombuffer(
                    self._piece, dtype=dtype, count=BUCKET // dtype.itemsize, offset=self._places[slot]
                )
        return self._tensors[slot, dtype]


def alone() -> Segment:
    """That of the only rank of the group on its host."""
    return Segment(memoryview((ctypes.c_char * _size(1))()).cast("B"), 1, bytes(_MARK))


def create(name: str, count: int) -> tuple[Segment, int]:
    """This rank's, and its file, to be closed when the others have opened it. OSError where there is no memory."""
    file, size = mapping.create(name), _size(count)
    try:
        mapping.allocate(file, 0, size)
        return Segment(mapping.map_piece(file, 0, size), count, secrets.token_bytes(_MARK)), file
    except OSError:
        os.close(file)
        raise


def open_at(process: int, number: int, mark: bytes, count: int) -> Segment:
    """That of another process, by the number its file has there. OSError where the kernel does not allow it."""
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        segment = Segment(mapping.map_piece(file, 0, _size(count)), count)
    finally:
        os.close(file)
    if segment.mark != mark:
        raise OSError(errno.ESTALE, f"process {process} has other memory there than that of the group")
    return segment


def _head(count: int) -> int:
    """Bytes before the first slot."""
    return -(-_LINE * (1 + len(Event) * count) // _PAGE) * _PAGE


def _size(count: int) -> int:
    return _head(count) + SLOTS * (DIGEST + BUCKET)
