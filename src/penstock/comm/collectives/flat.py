"""Tensors of one dtype as one sequence of elements, copied in pieces to and from shared memory."""

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
SMALL = 1 << 14  # bytes up to which copying is faster than releasing the interpreter's lock
PIECE = (1 << 15) - 1  # elements up to which torch adds in the calling thread: the other cores are busy


class Flat:
    """Contiguous tensors in host memory, one after another. The first element has the number `begin`."""

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
        """Return elements as a view of their tensor; None where they are in several."""
        at = bisect_right(self.starts, start) - 1
        if at < len(self.parts) and stop <= self.starts[at + 1]:
            return self.parts[at][start - self.starts[at] : stop - self.starts[at]]
        return None

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield address, offset in bytes from `start`, and size in bytes of each tensor's part."""
        at, now = bisect_right(self.starts, start) - 1, start
        while now < stop:
            then = min(stop, self.starts[at + 1])
            own = self._addresses[at] + (now - self.starts[at]) * self._size
            yield own, (now - start) * self._size, (then - now) * self._size
            at, now = at + 1, then


def copy(target: int, source: int, size: int) -> None:
    """Copy bytes from one address to another."""
    (_quick if size < SMALL else _slow)(target, source, size)


def add_up(terms: Sequence[Tensor], total: Tensor) -> None:
    """Add terms as ((t0 + t1) + t2) + ... `total` may share memory with the second term where there are two, else with
    none."""
    first, *rest = (torch.split(term, PIECE) for term in terms)
    totals = torch.split(total, PIECE)
    for term in rest:
        for a, b, out in zip(first, term, totals, strict=True):
            torch.add(a, b, out=out)
        first = totals
