"""A worker dies with the process that launched it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """Under torchrun: ask the kernel for an end when the agent ends, however that comes about.

    The kernel watches the thread that started this process. Only torchrun is known to start workers from a thread that
    lives as long as it does; penstock's own launcher has asked already.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)
