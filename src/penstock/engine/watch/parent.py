"""A worker dies with the process that launched it."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

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
