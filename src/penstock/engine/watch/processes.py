"""The end of other processes of this host, which are not this one's children.

Linux tells of it at once, by a file descriptor for each. Elsewhere it is asked for now and then.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from time import monotonic, sleep

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
