"""The status page of a rank: a page of memory that holds what the rank does now, readable by all processes of its host.

The page belongs to a file without a name, which other processes open through /proc, so nothing of it stays behind.
Where a system has no such files, a temporary file is used; its owner deletes its name once all have opened it.
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
class SharedFile:
    """A file that other processes can open. `fd`: this process's descriptor; `path`: where a process of the same user
    opens it."""

    fd: int
    path: str
    temporary: bool

    def unlink(self) -> None:
        """Delete the name of a temporary file: only processes that have opened it keep it."""
        if self.temporary:
            with suppress(OSError):
                Path(self.path).unlink()


def create_file(name: str, size: int) -> SharedFile:
    """Create a file of zeros."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        file = SharedFile(fd, f"/proc/{os.getpid()}/fd/{fd}", temporary=False)
    else:
        fd, path = tempfile.mkstemp(prefix=f"{name}-")
        file = SharedFile(fd, path, temporary=True)
    os.ftruncate(fd, size)
    return file


PAGE = mmap.PAGESIZE
STAGES, STAGES_END = 1024, 2048  # offsets of the stage names on the page: a length, and the text
REPORT, STACK, SIZE = PAGE, 16 * PAGE, 32 * PAGE  # offsets of the other texts, and the end of the last
VARIABLE = "PENSTOCK_STATUS_PAGE"  # environment variable: path of the page that the launcher has made for this rank
EVERYBODY = -1  # as a peer: all ranks, in a collective
OUTSIDE = -1  # as an operation: between two steps
RECENT = 8  # collectives on the page: the source of a broadcast may be ahead of those who wait for it
GATHER = 0  # as a kind of collective; else a broadcast from rank kind - 1


class RankState(IntEnum):
    """The state of a rank's process."""

    STARTING = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3


class PageField(IntEnum):
    """The numbers on the page, eight bytes each; times are of the host's monotonic clock, in nanoseconds."""

    STATE = 0
    OP = 1  # the current row: its operation, then its other numbers
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
    FED = 12  # progress in a run without a flush: see `place`
    LEAVING = 13  # the progress at which it ends that run; 0 before
    KINDS = 14  # the first of `RECENT` fields: number and kind of the last collectives
    LAST = 22  # the five numbers of the last row of the last step, as from OP on
    TOLD_AT = 27  # time of the failure report
    GONE = 28  # written by the launcher: 1 + a rank that ended before all had started
    VOTES = 29  # the first of two fields: number of a vote, and this rank's answer
    REPLICA = 31  # 1 + the rank's number among the replicas of its stages; 0 where there is one


_ROW_LENGTH = PageField.ROW_SINCE - PageField.OP
_ROW = struct.Struct(f"={PageField.BEAT - PageField.OP}q")  # a row, when it began, and 0 for no wait


def place(run: int, fed: int) -> int:
    """Encode a rank's progress in a run without a flush: the run's number and the mini-batches taken in."""
    return run << 32 | fed


def beyond(fed: int, leaving: int) -> bool:
    """Whether a rank has gone on where another has left its run: the two can only be at different points of the
    loop."""
    return leaving > 0 and fed > leaving and fed >> 32 == leaving >> 32


def kind_of(page: memoryview, number: int) -> int | None:
    """Return the kind of a rank's collective of that number; None where the rank has not reached it, or is far
    ahead."""
    recorded, kind = divmod(page[PageField.KINDS + number % RECENT], 1 << 32)
    return kind if recorded == number else None


def create_page(rank: int) -> SharedFile:
    """Create the file of an empty status page."""
    return create_file(f"penstock-status-{rank}", SIZE)


class StatusPage:
    """This rank's own page, which only this rank writes; `path`: of a page that a launcher has made for it."""

    def __init__(self, path: str | None = None) -> None:
        self.file = _opened(path) or create_file("penstock-status", SIZE)
        self.fd = self.file.fd
        self.map = mmap.mmap(self.fd, PAGE)
        self.fields = memoryview(self.map).cast("q")
        self.doing = self._make_doing()
        self.fields[PageField.OP] = self.fields[PageField.LAST] = OUTSIDE
        self.outside()
        self.beat()

    def _make_doing(self) -> Callable[[ActionRow], None]:
        page, now, pack, at = memoryview(self.map), monotonic_ns, _ROW.pack_into, 8 * PageField.OP

        def doing(row: ActionRow) -> None:
            pack(page, at, *row[:5], now(), 0)

        return doing

    def outside(self) -> None:
        """Record that the rank is between two steps."""
        if self.fields[PageField.OP] != OUTSIDE:
            self.fields[PageField.LAST : PageField.LAST + _ROW_LENGTH] = self.fields[PageField.OP : PageField.ROW_SINCE]
        _ROW.pack_into(self.map, 8 * PageField.OP, OUTSIDE, 0, 0, 0, 0, monotonic_ns(), 0)

    @property
    def row(self) -> str:
        return _in_words(self.fields, PageField.OP)

    @property
    def gone(self) -> int | None:
        """A rank that has ended before all had started, as the launcher has noticed; None if there is none."""
        return self.fields[PageField.GONE] - 1 if self.fields[PageField.GONE] else None

    def name_stages(self, stages: Iterable[int], replica: int | None = None) -> None:
        """Write the stages of this rank, and which replica of them it is, shown in reports before its first step."""
        names = sorted(stages)
        self.fields[PageField.REPLICA] = 0 if replica is None else replica + 1
        words = f"stage{'s' if len(names) > 1 else ''} {', '.join(map(str, names))}{_replica_in_words(self.fields)}"
        text = words.encode()[: STAGES_END - STAGES - 8]
        self.map[STAGES + 8 : STAGES + 8 + len(text)] = text
        self.fields[STAGES // 8] = len(text)

    def forget(self) -> None:
        """Reset the page after a failure to the state before the first collective."""
        self.outside()
        for slot in (
            PageField.FED,
            PageField.LEAVING,
            PageField.COLLECTIVES,
            *range(PageField.KINDS, PageField.LAST),
            PageField.VOTES,
            PageField.VOTES + 1,
        ):
            self.fields[slot] = 0
        self.fields[PageField.STATE] = RankState.RUNNING

    def beat(self) -> None:
        self.fields[PageField.BEAT] = monotonic_ns()

    def wait(self, peer: int, since: int) -> None:
        page = self.fields
        page[PageField.PEER] = peer
        page[PageField.WAIT_SINCE] = since
        page[PageField.WAIT_SEEN] = monotonic_ns()

    def begin_collective(self, kind: int) -> None:
        """Record the start of a collective."""
        number = self.fields[PageField.COLLECTIVES] + 1
        self.fields[PageField.KINDS + number % RECENT] = number << 32 | kind
        self.fields[PageField.COLLECTIVES] = number

    def publish_failure(self, report: bytes) -> None:
        """Write a failure report on the page."""
        self._write(REPORT, report)
        self.fields[PageField.TOLD_AT] = monotonic_ns()
        self.fields[PageField.STATE] = RankState.FAILED

    def show_stack(self, text: str) -> None:
        self._write(STACK, text.encode()[: SIZE - STACK - 8])

    def _write(self, at: int, text: bytes) -> None:
        if at + 8 + len(text) > os.fstat(self.fd).st_size:
            os.ftruncate(self.fd, at + 8 + len(text))
        os.pwrite(self.fd, bytes(8), at)
        os.pwrite(self.fd, text, at + 8)
        os.pwrite(self.fd, len(text).to_bytes(8, "little"), at)


class StatusPageReader:
    """The page of a rank of this host, read-only. `file`: its path, or an open descriptor."""

    def __init__(self, file: str | int) -> None:
        self.fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC) if isinstance(file, str) else os.dup(file)
        self.map = mmap.mmap(self.fd, PAGE, prot=mmap.PROT_READ)
        self.fields = memoryview(self.map).cast("q")

    def __getitem__(self, slot: PageField) -> int:
        return self.fields[slot]

    @property
    def state(self) -> RankState:
        return RankState(self.fields[PageField.STATE])

    @property
    def row(self) -> str:
        return _in_words(self.fields, PageField.OP)

    @property
    def blank(self) -> bool:
        """Whether no rank has written on the page."""
        return self.fields[PageField.BEAT] == 0

    @property
    def place(self) -> str:
        """Where the rank is, or was when it ended, as the end of a sentence."""
        if self.row:
            return f"in {self.row}"
        last = _in_words(self.fields, PageField.LAST)
        if last:
            return f"between two steps, after {last}"
        length = min(self.fields[STAGES // 8], STAGES_END - STAGES - 8)
        stages = os.pread(self.fd, length, STAGES + 8).decode(errors="replace")
        when = "while it was starting" if self.state == RankState.STARTING else "before its first step"
        return f"{when} ({stages})" if stages else when

    def report(self) -> bytes:
        return self._read(REPORT)

    def stack(self) -> str:
        return self._read(STACK).decode(errors="replace")

    def _read(self, at: int) -> bytes:
        length = int.from_bytes(os.pread(self.fd, 8, at), "little")
        return os.pread(self.fd, length, at + 8)


def _opened(path: str | None) -> SharedFile | None:
    """Open the page that a launcher has made; None where this process cannot open it, and has to make its own."""
    if path is not None:
        with suppress(OSError):
            return SharedFile(os.open(path, os.O_RDWR | os.O_CLOEXEC), path, temporary=False)
    return None


def _replica_in_words(page: memoryview) -> str:
    return f", replica {page[PageField.REPLICA] - 1}" if page[PageField.REPLICA] else ""


def _in_words(page: memoryview, at: PageField) -> str:
    """Return a row on the page as text; "" where there is none."""
    op, stage, microbatch, version, other = page[at : at + _ROW_LENGTH]
    if op == OUTSIDE:
        return ""
    op = Op.F if op == Op.FB else op  # FB's backward is a row of its own
    where = f"stage {stage}{_replica_in_words(page)}"
    where += f", micro-batch {microbatch}" if microbatch >= 0 else ""
    return f"{Action(Op(op), stage, microbatch, version, other)} ({where})"
