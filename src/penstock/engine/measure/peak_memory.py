"""Bytes of memory that this process has, and has had at most, by the books of whoever hands memory out.

The host's books are the kernel's: its high-water mark can be set back to what there is now, so that a mark from before
the training does not hide the training's own. Files that are mapped, libraries' code above all, are left out: how much
of them is in memory is up to the kernel. A GPU's are those of torch's allocator.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CLEAR_PEAK = "5"  # what the kernel wants to read there to set the mark back

_before = 0  # the mark when it was last set back


def resident() -> int:
    """Bytes of host memory now."""
    return _status("VmRSS")


def highest() -> int:
    """The most bytes of host memory since the process began."""
    return max(_status("VmHWM"), _before)


class PeakMemory:
    """What a rank had when it began to train, and at most since: on its device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base = 0

    def begin(self) -> None:
        if not self._cuda:
            _give_back()
        self.base = torch.cuda.memory_allocated(self.device) if self._cuda else resident() - _status("RssFile")

    def restart(self) -> None:
        """Forget the mark so far."""
        global _before
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        _before = highest()
        with suppress(OSError):
            CLEAR.write_text(CLEAR_PEAK)

    def added(self) -> int:
        """The most bytes since the restart, over those at the begin."""
        most = torch.cuda.max_memory_allocated(self.device) if self._cuda else _status("VmHWM") - _status("RssFile")
        return most - self.base

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"


def _give_back() -> None:
    """What was freed goes back to the system: else the training would find it there, and seem to take less."""
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int:
    """Linux's own books: getrusage there begins with what the parent process had. Elsewhere, the mark."""
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    if name == "RssFile":
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
