"""The thread that looks after the other ranks while the main thread computes or waits.

`Patience` counts how long a rank has really waited: the time in which it was itself stopped does not count.
"""

from __future__ import annotations

import select
import signal
import threading
from contextlib import suppress
from time import monotonic, monotonic_ns
from typing import Protocol

from penstock.comm.watch.process import Parent, Processes, Signals
from penstock.comm.watch.status import Board, Page, Slot, State
from penstock.comm.watch.stderr import main_stack

PAUSE = 2.0  # seconds between two questions of one wait, which come every 0.2: nobody was there to ask


class Patience(threading.local):
    """Of one thread."""

    def __init__(self) -> None:
        self.began = self.last = self.away = 0.0

    def counted(self, now: float, waited: float) -> float:
        """Seconds of the wait in which this process was running."""
        began = now - waited
        if abs(began - self.began) > 0.05:
            self.began, self.away = began, 0.0
        elif now - self.last > PAUSE:
            self.away += now - self.last
        self.last = now
        return waited - self.away


TICK = 200  # milliseconds: a heartbeat
STACK_EVERY = 1.0


class Listener(Protocol):
    """What the monitor tells of; called on its thread."""

    timeout: float

    def died(self, rank: int) -> None: ...

    def told(self, rank: int) -> None: ...

    def stuck(self, number: signal.Signals) -> None: ...

    def overdue(self) -> None:
        """Called on every tick."""


class Monitor:
    """Wakes at the death of a rank of this host, at a signal, and five times a second."""

    def __init__(
        self,
        board: Board,
        pages: dict[int, Page],
        pids: dict[int, int],
        listener: Listener,
        parent: Parent | None = None,
    ) -> None:
        """`pids`: of the ranks whose pages these are; `parent`: whom this process is to end with."""
        self.board, self.pages, self.listener = board, pages, listener
        self.signals = Signals()
        self.poll = select.poll()
        self.poll.register(self.signals.reader, select.POLLIN)
        self.processes = Processes(self.poll, pids)
        self.parent = parent
        self.leaving, self.stack_shown = False, 0.0
        self.thread = threading.Thread(target=self._run, name="penstock-monitor", daemon=True)
        self.thread.start()

    @property
    def gone(self) -> list[int]:
        """Ranks of this host that have ended."""
        return sorted(self.processes.gone)

    def leave(self) -> None:
        self.leaving = True
        with suppress(BlockingIOError):
            self.signals.writer.send(b"\0")
        self.thread.join(1.0)

    def _run(self) -> None:
        while not self.leaving:
            for rank in self.processes.ended():
                self._ended(rank)
            self.poll.poll(TICK)
            self.board.beat()
            self.signals.read()
            self._each_tick()

    def _ended(self, rank: int) -> None:
        state = self.pages[rank].state
        if state == State.FAILED:
            self.listener.told(rank)
        elif state != State.DONE:
            self.listener.died(rank)

    def _each_tick(self) -> None:
        if self.parent is not None:
            self.parent.follow()
        failed = [rank for rank, page in self.pages.items() if page[Slot.STATE] == State.FAILED]
        if failed:
            self.listener.told(failed[0])
        number = self.signals.stuck()
        if number is not None:
            self.listener.stuck(number)
        self._show_stack()
        self.listener.overdue()

    def _show_stack(self) -> None:
        """A rank that has been at one thing for long shows where, before somebody's patience ends."""
        now, page = monotonic(), self.board.page
        old = min(monotonic_ns() - page[Slot.ROW_SINCE], 10**15) / 1e9
        if old < self.listener.timeout / 3:
            if self.stack_shown:
                self.board.show_stack("")
            self.stack_shown = 0.0
        elif now - self.stack_shown > max(STACK_EVERY, self.listener.timeout / 10):
            self.stack_shown = now
            self.board.show_stack(main_stack())
