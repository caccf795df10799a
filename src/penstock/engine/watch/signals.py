"""Ctrl-C while the main thread is stuck in native code, where Python cannot raise KeyboardInterrupt: found by a byte
that Python's own handler writes at once, and by the handler in the main thread that never came."""

from __future__ import annotations

import os
import signal
import socket
import threading
from time import monotonic
from types import FrameType

STUCK = 3.0  # seconds in which the main thread has to come to a signal


class Signals:
    """Follows SIGINT and SIGTERM where Python handles them, and leaves their handling as it is."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        self.handled: dict[int, float] = {}
        self.came: dict[int, float] = {}
        self.ours: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            self._install()

    def _install(self) -> None:
        before = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)  # somebody else's event loop: theirs
            return
        os.register_at_fork(after_in_child=self._forget)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._wrap(number)

    def _wrap(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if not callable(before):
            return  # the kernel's own way, which needs no main thread
        user = before

        def handler(number: int, frame: FrameType | None) -> None:
            self.handled[number] = monotonic()
            user(number, frame)

        self.ours[number] = handler
        signal.signal(number, handler)

    def _forget(self) -> None:
        if self.ours and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)  # a child's signals are not ours

    def read(self) -> None:
        """Take note of the signals that came."""
        try:
            for number in self.reader.recv(64):
                self.came.setdefault(number, monotonic())
        except BlockingIOError:
            pass

    def stuck(self) -> signal.Signals | None:
        """The signal that the main thread has not come to in time."""
        now = monotonic()
        for number, when in list(self.came.items()):
            if now - when < STUCK:
                continue
            del self.came[number]
            mine = self.ours.get(number)
            if mine is not None and signal.getsignal(number) is mine and self.handled.get(number, 0.0) < when - 1.0:
                return signal.Signals(number)
        return None
