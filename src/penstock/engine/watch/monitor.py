"""The thread that looks after the other ranks while the main thread computes or waits."""

from __future__ import annotations

import select
import signal
import threading
from contextlib import suppress
from time import monotonic, monotonic_ns
from typing import Protocol

from penstock.engine.watch.board import Board, Page, Slot, State
from penstock.engine.watch.parent import Parent
from penstock.engine.watch.processes import Processes
from penstock.engine.watch.signals import Signals
from penstock.engine.watch.stacks import main_stack

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
