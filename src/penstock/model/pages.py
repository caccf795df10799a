"""Memory that was freed stays with the process, for whoever wants some next.

A measurement frees what its forwards kept, and the next round wants the same again. The C library of Linux would
meanwhile give pages back to the kernel, which hands them out anew one by one, each filled with zeros. In a measurement
of few micro-batches that falls on the same forwards each time: they were seen to take 15% longer than in training.
Ranks that train are not told so: what is kept is memory that nobody else has.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

TRIM, MAP = -1, -3  # what <malloc.h> calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
LARGEST = 32 << 20  # bytes: the most that MAP can be
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_pages() -> None:
    """From now on, unless whoever started this process has chosen how its memory is handed out."""
    if any(name in os.environ for name in CHOSEN):
        return
    with suppress(OSError, AttributeError):  # only glibc has it
        library = ctypes.CDLL(None)
        library.mallopt(TRIM, -1)
        library.mallopt(MAP, LARGEST)
