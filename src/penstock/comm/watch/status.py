"""The status page of a rank: a page of memory that says what the rank does now, readable on its whole host.

The page belongs to a file without a name, which other processes open through the process that has it open, and nothing
of it stays behind. Where a system has no such files, one in the directory for temporary files stands in; its owner
takes its name away once all have opened it.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns

from penstock.core.action import Action, Op
from penstock.core.lowered_loop import ActionRow


@dataclass(frozen=True)
class Nameless:
    """`fd`: this process's own; `path`: by which another process of the same user opens it."""

    fd: int
    path: str
    temporary: bool

    def take_name(self) -> None:
        """From now on only those have it that have opened it."""
        if self.temporary:
            with suppress(OSError):
                Path(self.path).unlink()


def create_file(name: str, size: int) -> Nameless:
    """A new file of zeros."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        made = Nameless(fd, f"/proc/{os.getpid()}/fd/{fd}", temporary=False)
    else:
        fd, path = tempfile.mkstemp(prefix=f"{name}-")
        made = Nameless(fd, path, temporary=True)
    os.ftruncate(fd, size)
    return made


PAGE = mmap.PAGESIZE
STAGES, STAGES_END = 1024, 2048  # where on the page the names of its stages are: a length, and the text
REPORT, STACK, SIZE = PAGE, 16 * PAGE, 32 * PAGE  # where the other texts begin and the last of them ends
VARIABLE = "PENSTOCK_BOARD"  # in the environment: the path of the page that a launcher has made for this rank
EVERYBODY = -1  # as a peer: a collective waits for all
OUTSIDE = -1  # as an operation: between two steps
RECENT = 8  # collectives: who sends a broadcast may be some ahead of those who wait for it
GATHER = 0  # as a kind of collective; else a broadcast from rank kind - 1


class State(IntEnum):
    STARTING = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3


class Slot(IntEnum):
    """The numbers on the page, eight bytes each; times are of the host's monotonic clock, in nanoseconds."""

    STATE = 0
    OP = 1  # of the row that it does now, then that row's other numbers
    STAGE = 2
    MICROBATCH = 3
    VERSION = 4
    OTHER = 5  # the stage at the other end of a transfer
    ROW_SINCE = 6
    WAIT_SEEN = 7
    BEAT = 8
    PEER = 9
    WAIT_SINCE = 10
    COLLECTIVES = 11
    FED = 12  # a place in a run without a flush: see `place`
    LEAVING = 13  # the place where it ends that run; 0 while it does not
    KINDS = 14  # the first of `RECENT`: number and kind of the last collectives
    LAST = 22  # the last row of the last step: its five numbers, as from OP on
    TOLD_AT = 27  # when the report was written
    GONE = 28  # written by the launcher: one more than the number of a rank that has ended before all had met
    VOTES = 29  # the first of two: number of a question to all ranks, and the answer
    REPLICA = 31  # one more than the rank's number among the replicas of its stages; 0 where there is one


_ROW_LENGTH = Slot.ROW_SINCE - Slot.OP
_ROW = struct.Struct(f"={Slot.BEAT - Slot.OP}q")  # a row, since when, and that it does not wait


def place(run: int, fed: int) -> int:
    """Of a rank in a run without a flush: the run's number, and the mini-batches that were taken in."""
    return run << 32 | fed


def beyond(fed: int, leaving: int) -> bool:
    """Whether a rank has gone on where another has left: by then both can only be at different points of the loop."""
    return leaving > 0 and fed > leaving and fed >> 32 == leaving >> 32


def kind_of(page: memoryview, number: int) -> int | None:
    """Of a rank's collective of that number; None where it has not come to it, or long left it behind."""
    known, kind = divmod(page[Slot.KINDS + number % RECENT], 1 << 32)
    return kind if known == number else None


def create_page(rank: int) -> Nameless:
    """The file of an empty board."""
    return create_file(f"penstock-board-{rank}", SIZE)


class Board:
    """This rank's own page, written by it alone; `path`: of one that a launcher has made for it."""

    def __init__(self, path: str | None = None) -> None:
        self.file = _opened(path) or create_file("penstock-board", SIZE)
        self.fd = self.file.fd
        self.map = mmap.mmap(self.fd, PAGE)
        self.page = memoryview(self.map).cast("q")
        self.doing = self._make_doing()
        self.page[Slot.OP] = self.page[Slot.LAST] = OUTSIDE
        self.outside()
        self.beat()

    def _make_doing(self) -> Callable[[ActionRow], None]:
        page, now, pack, at = memoryview(self.map), monotonic_ns, _ROW.pack_into, 8 * Slot.OP

        def doing(row: ActionRow) -> None:
            pack(page, at, *row[:5], now(), 0)

        return doing

    def outside(self) -> None:
        """Between two steps."""
        if self.page[Slot.OP] != OUTSIDE:
            self.page[Slot.LAST : Slot.LAST + _ROW_LENGTH] = self.page[Slot.OP : Slot.ROW_SINCE]
        _ROW.pack_into(self.map, 8 * Slot.OP, OUTSIDE, 0, 0, 0, 0, monotonic_ns(), 0)

    @property
    def row(self) -> str:
        return _in_words(self.page, Slot.OP)

    @property
    def gone(self) -> int | None:
        """A rank that will never come, as the launcher knows."""
        return self.page[Slot.GONE] - 1 if self.page[Slot.GONE] else None

    def name_stages(self, stages: Iterable[int], replica: int | None = None) -> None:
        """That this rank runs, and as which replica: what is known of where it is before its first step."""
        names = sorted(stages)
        self.page[Slot.REPLICA] = 0 if replica is None else replica + 1
        words = f"stage{'s' if len(names) > 1 else ''} {', '.join(map(str, names))}{_replica_in_words(self.page)}"
        text = words.encode()[: STAGES_END - STAGES - 8]
        self.map[STAGES + 8 : STAGES + 8 + len(text)] = text
        self.page[STAGES // 8] = len(text)

    def forget(self) -> None:
        """After a failure: back to a run in which nobody has met yet."""
        self.outside()
        for slot in (
            Slot.FED,
            Slot.LEAVING,
            Slot.COLLECTIVES,
            *range(Slot.KINDS, Slot.LAST),
            Slot.VOTES,
            Slot.VOTES + 1,
        ):
            self.page[slot] = 0
        self.page[Slot.STATE] = State.RUNNING

    def beat(self) -> None:
        self.page[Slot.BEAT] = monotonic_ns()

    def wait(self, peer: int, since: int) -> None:
        page = self.page
        page[Slot.PEER] = peer
        page[Slot.WAIT_SINCE] = since
        page[Slot.WAIT_SEEN] = monotonic_ns()

    def meet(self, kind: int) -> None:
        """A collective begins."""
        number = self.page[Slot.COLLECTIVES] + 1
        self.page[Slot.KINDS + number % RECENT] = number << 32 | kind
        self.page[Slot.COLLECTIVES] = number

    def tell(self, report: bytes) -> None:
        self._write(REPORT, report)
        self.page[Slot.TOLD_AT] = monotonic_ns()
        self.page[Slot.STATE] = State.FAILED

    def show_stack(self, text: str) -> None:
        self._write(STACK, text.encode()[: SIZE - STACK - 8])

    def _write(self, at: int, text: bytes) -> None:
        if at + 8 + len(text) > os.fstat(self.fd).st_size:
            os.ftruncate(self.fd, at + 8 + len(text))
        os.pwrite(self.fd, bytes(8), at)
        os.pwrite(self.fd, text, at + 8)
        os.pwrite(self.fd, len(text).to_bytes(8, "little"), at)


class Page:
    """A board as others read it: that of a rank of the same host, or one's own. `file`: its path, or an open one."""

    def __init__(self, file: str | int) -> None:
        self.fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC) if isinstance(file, str) else os.dup(file)
        self.map = mmap.mmap(self.fd, PAGE, prot=mmap.PROT_READ)
        self.page = memoryview(self.map).cast("q")

    def __getitem__(self, slot: Slot) -> int:
        return self.page[slot]

    @property
    def state(self) -> State:
        return State(self.page[Slot.STATE])

    @property
    def row(self) -> str:
        return _in_words(self.page, Slot.OP)

    @property
    def blank(self) -> bool:
        """Whether no rank has come to write on it."""
        return self.page[Slot.BEAT] == 0

    @property
    def place(self) -> str:
        """Where the rank is, or was when it ended, as the end of a sentence."""
        if self.row:
            return f"in {self.row}"
        last = _in_words(self.page, Slot.LAST)
        if last:
            return f"between two steps, after {last}"
        length = min(self.page[STAGES // 8], STAGES_END - STAGES - 8)
        stages = os.pread(self.fd, length, STAGES + 8).decode(errors="replace")
        when = "while it was starting" if self.state == State.STARTING else "before its first step"
        return f"{when} ({stages})" if stages else when

    def report(self) -> bytes:
        return self._read(REPORT)

    def stack(self) -> str:
        return self._read(STACK).decode(errors="replace")

    def _read(self, at: int) -> bytes:
        length = int.from_bytes(os.pread(self.fd, 8, at), "little")
        return os.pread(self.fd, length, at + 8)


def _opened(path: str | None) -> Nameless | None:
    """A launcher's page; None where this process cannot open it, and has to make its own."""
    if path is not None:
        with suppress(OSError):
            return Nameless(os.open(path, os.O_RDWR | os.O_CLOEXEC), path, temporary=False)
    return None


def _replica_in_words(page: memoryview) -> str:
    return f", replica {page[Slot.REPLICA] - 1}" if page[Slot.REPLICA] else ""


def _in_words(page: memoryview, at: Slot) -> str:
    """A row on the page, for people; "" where there is none."""
    op, stage, microbatch, version, other = page[at : at + _ROW_LENGTH]
    if op == OUTSIDE:
        return ""
    op = Op.F if op == Op.FB else op  # whose backward is a row of its own
    where = f"stage {stage}{_replica_in_words(page)}"
    where += f", micro-batch {microbatch}" if microbatch >= 0 else ""
    return f"{Action(Op(op), stage, microbatch, version, other)} ({where})"
