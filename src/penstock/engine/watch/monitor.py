"""The thread that looks after the other ranks while the main thread computes or waits."""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import suppress
from time import monotonic, monotonic_ns
from typing import Protocol

from penstock.engine.watch.board import Board, Page, Slot, State
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

    def __init__(self, board: Board, pages: dict[int, Page], pids: dict[int, int], listener: Listener) -> None:
        self.board, self.pages, self.listener = board, pages, listener
        self.signals = Signals()
        self.pidfds: dict[int, int] = {}  # of a rank
        self.gone: set[int] = set()
        self.poll = select.poll()
        self.poll.register(self.signals.reader, select.POLLIN)
        for rank, pid in pids.items():
            self._follow(rank, pid)
        self.leaving, self.stack_shown = False, 0.0
        self.thread = threading.Thread(target=self._run, name="penstock-monitor", daemon=True)
        self.thread.start()

    def _follow(self, rank: int, pid: int) -> None:
        try:
            self.pidfds[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self.gone.add(rank)
        else:
            self.poll.register(self.pidfds[rank], select.POLLIN)

    def kill(self, rank: int) -> None:
        """A rank of this host that gives no sign of life, and would hold the launcher up."""
        if rank in self.pidfds and rank not in self.gone:
            signal.pidfd_send_signal(self.pidfds[rank], signal.SIGKILL)

    def await_end(self, rank: int, seconds: float) -> bool:
        """Whether a rank of this host ends within that time."""
        if rank not in self.pidfds:
            return False
        poll = select.poll()
        poll.register(self.pidfds[rank], select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def leave(self) -> None:
        self.leaving = True
        with suppress(BlockingIOError):
            self.signals.writer.send(b"\0")
        self.thread.join(1.0)

    def _run(self) -> None:
        for rank in list(self.gone):
            self._ended(rank)
        while not self.leaving:
            ready = {fd for fd, _ in self.poll.poll(TICK)}
            self.board.beat()
            self.signals.read()
            for rank, fd in self.pidfds.items():
                if fd in ready:
                    self.poll.unregister(fd)
                    self.gone.add(rank)
                    self._ended(rank)
            self._each_tick()

    def _ended(self, rank: int) -> None:
        state = self.pages[rank].state
        if state == State.FAILED:
            self.listener.told(rank)
        elif state != State.DONE:
            self.listener.died(rank)

    def _each_tick(self) -> None:
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
