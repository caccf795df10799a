"""For tests that measure a process's memory."""

from __future__ import annotations

import ctypes

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def give_back_what_is_freed(least: int = 65536) -> None:
    """Tensors of so many bytes go back to the system when they are freed, and are not kept for the next."""
    if not ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, least):
        raise OSError("the C library takes no such threshold")
