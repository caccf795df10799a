"""The thread that watches the other ranks while the main thread computes or waits.

`WaitClock` measures how long a rank has really waited: time in which its own process was stopped does not count.
"""

from __future__ import annotations

import select
import signal
import threading
from contextlib import suppress
from time import monotonic, monotonic_ns
from typing import Protocol

from penstock.comm.watch.process import Parent, Processes, Signals
from penstock.comm.watch.status import PageField, RankState, StatusPage, StatusPageReader
from penstock.comm.watch.stderr import main_stack

PAUSE = 2.0  # seconds between two checks of one wait, made every 0.2, above which this process was stopped


class WaitClock(threading.local):
    """The clock of the current wait, one for each thread."""

    def __init__(self) -> None:
        self.began = self.last = self.stopped_seconds = 0.0

    def running_seconds(self, now: float, waited: float) -> float:
        """Return the seconds of the wait in which this process was running."""
        began = now - waited
        if abs(began - self.began) > 0.05:
            self.began, self.stopped_seconds = began, 0.0
        elif now - self.last > PAUSE:
            self.stopped_seconds += now - self.last
        self.last = now
        return waited - self.stopped_seconds


TICK = 200  # milliseconds between two heartbeats
STACK_EVERY = 1.0


class Listener(Protocol):
    """The callbacks of the monitor, called on its thread."""

    timeout: float

    def rank_died(self, rank: int) -> None: ...

    def rank_failed(self, rank: int) -> None: ...

    def signal_unhandled(self, number: signal.Signals) -> None: ...

    def end_if_overdue(self) -> None:
        """Called on every tick."""


class Monitor:
    """The monitor thread. Wakes when a rank of this host ends, at a signal, and five times a second."""

    def __init__(
        self,
        status_page: StatusPage,
        pages: dict[int, StatusPageReader],
        pids: dict[int, int],
        listener: Listener,
        parent: Parent | None = None,
    ) -> None:
        """`pids`: of the ranks that `pages` belong to; `parent`: the process with which this one ends."""
        self.status_page, self.pages, self.listener = status_page, pages, listener
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
            self.status_page.beat()
            self.signals.read()
            self._each_tick()

    def _ended(self, rank: int) -> None:
        state = self.pages[rank].state
        if state == RankState.FAILED:
            self.listener.rank_failed(rank)
        elif state != RankState.DONE:
            self.listener.rank_died(rank)

    def _each_tick(self) -> None:
        if self.parent is not None:
            self.parent.follow()
        failed = [rank for rank, page in self.pages.items() if page[PageField.STATE] == RankState.FAILED]
        if failed:
            self.listener.rank_failed(failed[0])
        number = self.signals.signal_unhandled()
        if number is not None:
            self.listener.signal_unhandled(number)
        self._show_stack()
        self.listener.end_if_overdue()

    def _show_stack(self) -> None:
        """Write the main thread's stack on the status page when a row takes long, before another rank's time-out."""
        now, page = monotonic(), self.status_page.fields
        seconds = min(monotonic_ns() - page[PageField.ROW_SINCE], 10**15) / 1e9
        if seconds < self.listener.timeout / 3:
            if self.stack_shown:
                self.status_page.show_stack("")
            self.stack_shown = 0.0
        elif now - self.stack_shown > max(STACK_EVERY, self.listener.timeout / 10):
            self.stack_shown = now
            self.status_page.show_stack(main_stack())
