"""The tensors of collectives between all ranks: a few bytes from each, again and again.

A thread of gloo's lets go of a collective's tensors a moment after it is done, and needs the lock of the interpreter
for it; one that asks for that when the interpreter is about to end aborts the process. So whoever ends has to wait,
and has to know of all that is out: small collectives share one set of tensors, which tells.
"""

from __future__ import annotations

import sys
from time import monotonic, sleep

import torch

SHORT = 1024  # bytes, with eight for the length: what a small collective carries
HEAD = 8
LINGER = 1.0  # seconds that gloo's threads have for letting go


class Rows:
    """Of one process among `size`. What a collective has brought is to be read before the next one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._short = self._made(SHORT)
        self._long: list[torch.Tensor] = []  # of the last large collective
        self._own = max(_references(self._short))  # while nobody else has any: how many differs between interpreters

    def packed(self, data: bytes, size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A row of so many bytes that begins with data and its length, and room for such a row of every rank."""
        tensors = self._short
        if size != SHORT:
            tensors = self._long = self._made(size)
        row, *rows = tensors
        view = row.numpy().data
        view[:HEAD] = len(data).to_bytes(HEAD, "little")
        kept = data[: size - HEAD]
        view[HEAD : HEAD + len(kept)] = kept
        return row, rows

    def let_go(self) -> None:
        """Wait until nobody else holds a tensor."""
        until = monotonic() + LINGER
        while self._out() and monotonic() < until:
            sleep(0.001)

    def _out(self) -> bool:
        """By torch's count, and by Python's, which torch changes when it has the lock."""
        every = [*self._short, *self._long]
        counts = _references(every)
        listed = 1  # `every` itself
        return max(counts) > self._own + listed or any(tensor._use_count() > 1 for tensor in every)  # type: ignore[attr-defined]

    def _made(self, size: int) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.uint8, device="cpu") for _ in range(1 + self.size)]


def _references(tensors: list[torch.Tensor]) -> list[int]:
    return [sys.getrefcount(tensor) for tensor in tensors]


def length(row: torch.Tensor) -> int:
    """Of the data in a row."""
    return int.from_bytes(data_of(row[:HEAD], HEAD, 0), "little")


def data_of(row: torch.Tensor, size: int, start: int = HEAD) -> bytes:
    return row[start : start + size].numpy().tobytes()
