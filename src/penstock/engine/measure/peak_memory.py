"""Current and peak memory of this process, as the allocator reports it.

On the host this is the kernel's high-water mark, which is reset when measurement begins, so that an earlier peak does
not hide that of the training. Mapped files, mainly the code of libraries, are left out: the kernel decides how much of
them is in memory. On a GPU it is torch's allocator.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CLEAR_PEAK = "5"  # written to CLEAR to reset the high-water mark

_before = 0  # the mark when it was last reset


def resident() -> int:
    """Return the current bytes of host memory."""
    return _status("VmRSS")


def highest() -> int:
    """Return the peak bytes of host memory since the process began."""
    return max(_status("VmHWM"), _before)


class PeakMemory:
    """The memory of a rank on its device before it trains, and its peak since then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base = 0

    def begin(self) -> None:
        if not self._cuda:
            _give_back()
        self.base = torch.cuda.memory_allocated(self.device) if self._cuda else resident() - _status("RssFile")

    def restart(self) -> None:
        """Reset the peak."""
        global _before
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        _before = highest()
        with suppress(OSError):
            CLEAR.write_text(CLEAR_PEAK)

    def added(self) -> int:
        """Return the peak bytes since the restart, without those in use at the start."""
        most = torch.cuda.max_memory_allocated(self.device) if self._cuda else _status("VmHWM") - _status("RssFile")
        return most - self.base

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"


def _give_back() -> None:
    """Return freed memory to the system. Otherwise training would reuse it, and seem to take less."""
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int:
    """Return a figure of this process in bytes from Linux; there, getrusage includes the parent's peak. Elsewhere,
    return the peak of getrusage."""
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    if name == "RssFile":
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
