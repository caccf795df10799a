"""Keep freed memory in the process, for the next allocation.

A measurement frees what its forwards kept, and the next round allocates the same again. In between, the C library of
Linux would return pages to the kernel, which hands them out again one by one, filled with zeros. In a measurement of
few micro-batches this always hits the same forwards, which were seen to take 15% longer than in training. Training
ranks do not use it, as it withholds memory from other processes.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

TRIM, MAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
LARGEST = 32 << 20  # bytes: the largest value of MAP
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_pages() -> None:
    """Keep freed pages from now on, unless the environment configures the allocator."""
    if any(name in os.environ for name in CHOSEN):
        return
    with suppress(OSError, AttributeError):  # only glibc has it
        library = ctypes.CDLL(None)
        library.mallopt(TRIM, -1)
        library.mallopt(MAP, LARGEST)
