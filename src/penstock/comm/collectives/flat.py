"""Tensors of one dtype as one run of elements, copied piece by piece to and from memory that ranks share."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

_quick, _slow = ctypes.PyDLL(None).memmove, ctypes.CDLL(None).memmove
for _move in (_quick, _slow):
    _move.argtypes, _move.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
SMALL = 1 << 14  # bytes that are copied sooner than the interpreter's lock is given away
PIECE = (1 << 15) - 1  # elements up to which torch adds in the calling thread: the others' cores are at work


class Flat:
    """Contiguous tensors in host memory, one after the other. The first element has the number `begin`."""

    def __init__(self, tensors: Sequence[Tensor], begin: int = 0) -> None:
        self.parts = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
        self.begin = begin
        self.starts = [*accumulate((part.numel() for part in self.parts), initial=begin)]
        self.end = self.starts[-1]
        self._addresses = [part.data_ptr() for part in self.parts]
        self._size = self.parts[0].itemsize if self.parts else 1

    def read(self, start: int, stop: int, address: int) -> None:
        """Copy elements from the tensors to an address."""
        for own, offset, size in self._pieces(start, stop):
            copy(address + offset, own, size)

    def write(self, start: int, stop: int, address: int) -> None:
        """Copy elements from an address into the tensors."""
        for own, offset, size in self._pieces(start, stop):
            copy(own, address + offset, size)

    def view(self, start: int, stop: int) -> Tensor | None:
        """Elements as a view of the tensor that they are in; None where they are in several."""
        at = bisect_right(self.starts, start) - 1
        if at < len(self.parts) and stop <= self.starts[at + 1]:
            return self.parts[at][start - self.starts[at] : stop - self.starts[at]]
        return None

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Address, bytes since `start`, and size in bytes of each tensor's part."""
        at, now = bisect_right(self.starts, start) - 1, start
        while now < stop:
            then = min(stop, self.starts[at + 1])
            own = self._addresses[at] + (now - self.starts[at]) * self._size
            yield own, (now - start) * self._size, (then - now) * self._size
            at, now = at + 1, then


def copy(target: int, source: int, size: int) -> None:
    """Bytes from one address to another."""
    (_quick if size < SMALL else _slow)(target, source, size)


def add_up(terms: Sequence[Tensor], total: Tensor) -> None:
    """((t0 + t1) + t2) + ... Only the second of two terms may be the total."""
    first, *rest = (torch.split(term, PIECE) for term in terms)
    totals = torch.split(total, PIECE)
    for term in rest:
        for a, b, out in zip(first, term, totals, strict=True):
            torch.add(a, b, out=out)
        first = totals
