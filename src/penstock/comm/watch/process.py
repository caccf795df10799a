"""Processes and signals, as the operating system reports them.

The end of the launcher: a worker dies with it. The end of other processes of this host that are not this one's
children. Ctrl-C while the main thread is stuck in native code, where Python cannot raise KeyboardInterrupt.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from types import FrameType

_PR_SET_PDEATHSIG = 1


class Parent:
    """The launcher of this process, where the system cannot be asked to end both together: looked for now and then."""

    def __init__(self) -> None:
        self.pid = os.getppid()

    def follow(self) -> None:
        if os.getppid() != self.pid:
            os.kill(os.getpid(), signal.SIGKILL)


def follow_parent(launched: bool) -> Parent | None:
    """Ask the kernel for an end when the launcher ends, however that comes about; where it cannot be asked, return
    whom to look for.

    The kernel watches the thread that started this process. Only torchrun is known to start workers from a thread that
    lives as long as it does; penstock's own launcher has asked already. `launched`: by one of the two.
    """
    if not launched:
        return None
    ask = system_call("prctl")
    if ask is None:
        return Parent()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        ask(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it ended before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)
    return None


def system_call(name: str) -> Callable[..., int] | None:
    """A function of the C library; None where it has none of that name."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


ASK = 0.02  # seconds between two questions where the system does not tell


class Processes:
    """Processes by number: some key of the caller's, and the process's own."""

    def __init__(self, poll: select.poll, pids: dict[int, int]) -> None:
        """`poll` wakes at their ends, where the system tells."""
        self.poll, self.pids = poll, pids
        self.gone: set[int] = set()
        self.descriptors: dict[int, int] = {}
        if hasattr(os, "pidfd_open"):
            for key, pid in pids.items():
                with suppress(ProcessLookupError):
                    self.descriptors[key] = os.pidfd_open(pid)
                    poll.register(self.descriptors[key], select.POLLIN)

    def ended(self) -> list[int]:
        """Those that have ended since the last question."""
        now = [key for key in self.pids if key not in self.gone and not self.alive(key)]
        for key in now:
            self.gone.add(key)
            if key in self.descriptors:
                self.poll.unregister(self.descriptors[key])
        return now

    def alive(self, key: int) -> bool:
        if not hasattr(os, "pidfd_open"):
            return is_running(self.pids[key])
        return key in self.descriptors and not _readable(self.descriptors[key], 0.0)

    def kill(self, key: int) -> None:
        """SIGKILL for one that has not ended."""
        if key not in self.pids or key in self.gone:
            return
        with suppress(ProcessLookupError):
            if key in self.descriptors:
                signal.pidfd_send_signal(self.descriptors[key], signal.SIGKILL)
            elif not hasattr(os, "pidfd_open"):
                os.kill(self.pids[key], signal.SIGKILL)

    def await_end(self, key: int, seconds: float) -> bool:
        """Whether one ends within that time; not for one that is unknown."""
        if key in self.descriptors:
            return _readable(self.descriptors[key], seconds)
        until = monotonic() + seconds
        while key in self.pids and self.alive(key) and monotonic() < until:
            sleep(ASK)
        return key in self.pids and not self.alive(key)


def is_running(pid: int) -> bool:
    """Whether there is a process of that number; one that waits to be buried counts."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


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
