"""Tensors for collectives that exchange a few bytes between all ranks.

A gloo thread releases a collective's tensors shortly after the collective is done, and needs the interpreter's lock for
that. If it asks for the lock while the interpreter shuts down, the process aborts. So a process has to wait at its end
until gloo has released all tensors. To make that possible, small collectives share one set of tensors, whose reference
counts show whether gloo still holds them.
"""

from __future__ import annotations

import sys
from time import monotonic, sleep

import torch

SHORT = 1024  # bytes of a row in a small collective, the length included
HEAD = 8  # bytes of the length at the start of a row
LINGER = 1.0  # seconds to wait for gloo's threads to release the tensors


class CollectiveBuffers:
    """Send and receive buffers of one process among `size`. The next collective overwrites what the last one
    received."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._short = self._allocate(SHORT)
        self._long: list[torch.Tensor] = []  # buffers of the last large collective
        # Python's reference count while no other thread holds a buffer; it differs between interpreters
        self._unused_count = max(_references(self._short))

    def pack(self, data: bytes, size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return a row of `size` bytes that holds the length of the data and the data, and buffers for the rows of all
        ranks."""
        tensors = self._short
        if size != SHORT:
            tensors = self._long = self._allocate(size)
        row, *rows = tensors
        view = row.numpy().data
        view[:HEAD] = len(data).to_bytes(HEAD, "little")
        fitting = data[: size - HEAD]
        view[HEAD : HEAD + len(fitting)] = fitting
        return row, rows

    def wait_released(self) -> None:
        """Wait until no other thread holds a buffer, for at most LINGER seconds."""
        until = monotonic() + LINGER
        while self._in_use() and monotonic() < until:
            sleep(0.001)

    def _in_use(self) -> bool:
        """Whether another thread holds a buffer, by torch's count or Python's. Torch changes the latter only with the
        lock."""
        buffers = [*self._short, *self._long]
        counts = _references(buffers)
        listed = 1  # the list `buffers` itself
        return max(counts) > self._unused_count + listed or any(tensor._use_count() > 1 for tensor in buffers)  # type: ignore[attr-defined]

    def _allocate(self, size: int) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.uint8, device="cpu") for _ in range(1 + self.size)]


def _references(tensors: list[torch.Tensor]) -> list[int]:
    return [sys.getrefcount(tensor) for tensor in tensors]


def length(row: torch.Tensor) -> int:
    """Return the length of the data in a row."""
    return int.from_bytes(data_of(row[:HEAD], HEAD, 0), "little")


def data_of(row: torch.Tensor, size: int, start: int = HEAD) -> bytes:
    return row[start : start + size].numpy().tobytes()
