"""The board of a rank: a page of memory that says what it does now, readable by the other ranks of its host.

The page belongs to a file without a name, so that nothing stays behind, and outlives its process for those who have
opened it: what a killed rank was doing can still be read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from enum import IntEnum
from time import monotonic_ns

PAGE = mmap.PAGESIZE
REPORT, STACK, WORDS = PAGE, 16 * PAGE, 32 * PAGE  # where the texts begin
EVERYBODY = -1  # as a peer: a collective waits for all
OUTSIDE = -1  # as a row: between two steps
MOST_ROWS = 1 << 14  # described, where nobody says how many there are


class State(IntEnum):
    STARTING = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3


class Slot(IntEnum):
    """The numbers on the page, eight bytes each; times are of the host's monotonic clock, in nanoseconds."""

    STATE = 0
    ROW = 1
    ROW_SINCE = 2
    BEAT = 3
    PEER = 4
    WAIT_SINCE = 5
    WAIT_SEEN = 6
    COLLECTIVES = 7


_ROW, _ROW_SINCE, _WAIT_SEEN = int(Slot.ROW), int(Slot.ROW_SINCE), int(Slot.WAIT_SEEN)


class Board:
    """This rank's own page, written by it alone."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("penstock-board")
        os.ftruncate(self.fd, WORDS)
        self.map = mmap.mmap(self.fd, PAGE)
        self.page = memoryview(self.map).cast("q")
        self.words: Callable[[int], str] | None = None
        self.doing = self._make_doing()
        self.doing(OUTSIDE)
        self.beat()

    def _make_doing(self) -> Callable[[int], None]:
        page, now = self.page, monotonic_ns

        def doing(row: int) -> None:
            page[_ROW] = row
            page[_ROW_SINCE] = now()
            page[_WAIT_SEEN] = 0

        return doing

    def beat(self) -> None:
        self.page[Slot.BEAT] = monotonic_ns()

    def wait(self, peer: int, since: int) -> None:
        page = self.page
        page[Slot.PEER] = peer
        page[Slot.WAIT_SINCE] = since
        page[Slot.WAIT_SEEN] = monotonic_ns()

    def describe(self, words: Callable[[int], str], rows: int | None) -> None:
        self.words = words
        lines = []
        try:
            for row in range(MOST_ROWS if rows is None else rows):
                lines.append(words(row).replace("\n", " "))
        except LookupError:
            pass  # the row after the last
        self._write(WORDS, "\n".join(lines).encode())

    def tell(self, report: bytes) -> None:
        self._write(REPORT, report)
        self.page[Slot.STATE] = State.FAILED

    def show_stack(self, text: str) -> None:
        self._write(STACK, text.encode()[: WORDS - STACK - 8])

    def _write(self, at: int, text: bytes) -> None:
        if at + 8 + len(text) > os.fstat(self.fd).st_size:
            os.ftruncate(self.fd, at + 8 + len(text))
        os.pwrite(self.fd, bytes(8), at)
        os.pwrite(self.fd, text, at + 8)
        os.pwrite(self.fd, len(text).to_bytes(8, "little"), at)


class Page:
    """A board as others read it: that of a rank of the same host, or one's own."""

    def __init__(self, pid: int, fd: int) -> None:
        self.fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        self.map = mmap.mmap(self.fd, PAGE, prot=mmap.PROT_READ)
        self.page = memoryview(self.map).cast("q")

    def __getitem__(self, slot: Slot) -> int:
        return self.page[slot]

    @property
    def state(self) -> State:
        return State(self.page[Slot.STATE])

    def words(self, row: int) -> str:
        """How the rank describes a row of its own."""
        if row < 0:
            return ""
        lines = self._read(WORDS).decode(errors="replace").split("\n")
        return lines[row] if row < len(lines) and lines[row] else f"row {row} of its schedule"

    def report(self) -> bytes:
        return self._read(REPORT)

    def stack(self) -> str:
        return self._read(STACK).decode(errors="replace")

    def _read(self, at: int) -> bytes:
        length = int.from_bytes(os.pread(self.fd, 8, at), "little")
        return os.pread(self.fd, length, at + 8)
