"""Processes and signals, as the operating system reports them.

A worker ends with its launcher. The end of other processes of this host, which are not children of this one, is
detected. So is Ctrl-C while the main thread is stuck in native code, where Python cannot raise KeyboardInterrupt.
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
    """The launcher of this process, polled where the system cannot be asked to end both together."""

    def __init__(self) -> None:
        self.pid = os.getppid()

    def follow(self) -> None:
        """End this process if the launcher has ended."""
        if os.getppid() != self.pid:
            os.kill(os.getpid(), signal.SIGKILL)


def follow_parent(launched: bool) -> Parent | None:
    """Ask the kernel to end this process with its launcher. Return the launcher to poll where the kernel cannot do
    that.

    The kernel watches the thread that started this process. Of other launchers, only torchrun is known to start workers
    from a thread that lives as long as itself; penstock's own launcher has asked already. `launched`: by one of the
    two.
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
    """Return a function of the C library, or None where it has none of that name."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


ASK = 0.02  # seconds between two polls where the system does not notify


class Processes:
    """Processes of this host, by a key of the caller's."""

    def __init__(self, poll: select.poll, pids: dict[int, int]) -> None:
        """`poll` wakes when a process ends, where the system supports it."""
        self.poll, self.pids = poll, pids
        self.gone: set[int] = set()
        self.descriptors: dict[int, int] = {}
        if hasattr(os, "pidfd_open"):
            for key, pid in pids.items():
                with suppress(ProcessLookupError):
                    self.descriptors[key] = os.pidfd_open(pid)
                    poll.register(self.descriptors[key], select.POLLIN)

    def ended(self) -> list[int]:
        """Return the keys of processes that have ended since the last call."""
        ended = [key for key in self.pids if key not in self.gone and not self.alive(key)]
        for key in ended:
            self.gone.add(key)
            if key in self.descriptors:
                self.poll.unregister(self.descriptors[key])
        return ended

    def alive(self, key: int) -> bool:
        if not hasattr(os, "pidfd_open"):
            return is_running(self.pids[key])
        return key in self.descriptors and not _readable(self.descriptors[key], 0.0)

    def kill(self, key: int) -> None:
        """Send SIGKILL to a process that has not ended."""
        if key not in self.pids or key in self.gone:
            return
        with suppress(ProcessLookupError):
            if key in self.descriptors:
                signal.pidfd_send_signal(self.descriptors[key], signal.SIGKILL)
            elif not hasattr(os, "pidfd_open"):
                os.kill(self.pids[key], signal.SIGKILL)

    def await_end(self, key: int, seconds: float) -> bool:
        """Return whether a process ends within that time; False for an unknown one."""
        if key in self.descriptors:
            return _readable(self.descriptors[key], seconds)
        until = monotonic() + seconds
        while key in self.pids and self.alive(key) and monotonic() < until:
            sleep(ASK)
        return key in self.pids and not self.alive(key)


def is_running(pid: int) -> bool:
    """Whether there is a process with that ID; a zombie counts."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


STUCK = 3.0  # seconds within which the main thread has to handle a signal


class Signals:
    """The signals SIGINT and SIGTERM where Python handles them; their handling stays as it is."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        self.handled: dict[int, float] = {}
        self.arrived: dict[int, float] = {}
        self.handlers: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            self._install()

    def _install(self) -> None:
        before = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)  # another event loop uses it
            return
        os.register_at_fork(after_in_child=self._forget)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._wrap(number)

    def _wrap(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if not callable(before):
            return  # handled by the kernel, without the main thread
        user = before

        def handler(number: int, frame: FrameType | None) -> None:
            self.handled[number] = monotonic()
            user(number, frame)

        self.handlers[number] = handler
        signal.signal(number, handler)

    def _forget(self) -> None:
        if self.handlers and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)  # a child's signals do not concern this process

    def read(self) -> None:
        """Record the signals that have arrived."""
        try:
            for number in self.reader.recv(64):
                self.arrived.setdefault(number, monotonic())
        except BlockingIOError:
            pass

    def signal_unhandled(self) -> signal.Signals | None:
        """Return a signal that the main thread has not handled in time; None if there is none."""
        now = monotonic()
        for number, when in list(self.arrived.items()):
            if now - when < STUCK:
                continue
            del self.arrived[number]
            handler = self.handlers.get(number)
            if (
                handler is not None
                and signal.getsignal(number) is handler
                and self.handled.get(number, 0.0) < when - 1.0
            ):
                return signal.Signals(number)
        return None
