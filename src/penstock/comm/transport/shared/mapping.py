"""Memory that two processes share, and a semaphore of the C library in it.

The memory is an anonymous file, mapped piece by piece. The file has no name in the file system, so nothing is left
behind: the kernel frees it when the last process that has it open or mapped ends.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_fallocate = getattr(_libc, "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_FAILED = ctypes.c_void_p(-1).value
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate


def can_share_memory() -> bool:
    """Whether this system has the calls that shared memory needs here, as Linux does."""
    return hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate") and _fallocate is not None


def create(name: str) -> int:
    """Create a file in memory, open in this process alone. The name is shown in /proc."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def allocate(file: int, offset: int, size: int) -> None:
    """Allocate memory for a piece of the file, or raise OSError. Writing to a piece without memory would kill the
    process."""
    if size > available():
        raise OSError(errno.ENOMEM, f"{size} bytes asked for shared memory, {available()} available")
    os.posix_fallocate(file, offset, size)


def free(file: int, offset: int, size: int) -> None:
    """Free the memory of a piece. Where it is mapped, it reads as zeros from now on."""
    assert _fallocate is not None
    _fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, offset, size)


def map_piece(file: int, offset: int, size: int) -> memoryview:
    """Map a piece of the file as writable bytes, with its pages allocated. It is unmapped when the last view is
    deleted."""
    # An access beyond the end would kill the process.
    if offset < 0 or size <= 0 or offset + size > os.fstat(file).st_size:
        raise OSError(errno.EINVAL, f"no piece of {size} bytes at {offset} in a file of {os.fstat(file).st_size}")
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _POPULATE
    address = _libc.mmap(None, size, protection, flags, file, offset)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {size} bytes of shared memory: {os.strerror(code)}")
    piece = (ctypes.c_char * size).from_address(address)
    weakref.finalize(piece, _libc.munmap, address, size).atexit = False  # tensors may outlive the interpreter's exit
    return memoryview(piece).cast("B")


def address_of(piece: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))


def available() -> int:
    """Return the bytes that can be allocated without the kernel killing a process; a large number where unknown."""
    try:
        with Path("/proc/meminfo").open() as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62


BYTES = 64  # more than any C library's sem_t


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_quick = ctypes.PyDLL(None)  # keeps the interpreter's lock, for calls that never wait
_slow = ctypes.CDLL(None)
_init, _post, _try = _quick.sem_init, _quick.sem_post, _quick.sem_trywait
_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
_post.argtypes = _try.argtypes = [ctypes.c_void_p]
_CLOCK: int | None = time.CLOCK_MONOTONIC if hasattr(_slow, "sem_clockwait") else None
_wait = getattr(_slow, "sem_timedwait" if _CLOCK is None else "sem_clockwait", None)  # macOS has neither
if _CLOCK is None and _wait is not None:  # C libraries that know only the wall clock, which may be set back
    _wait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Time)]
elif _wait is not None:
    _wait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Time)]


def has_semaphores() -> bool:
    """Whether the C library has semaphores with a timed wait."""
    return _wait is not None


class Semaphore:
    """A semaphore in BYTES of shared memory, which it keeps alive. One end creates it, before any other use."""

    def __init__(self, room: memoryview, create: bool) -> None:
        self._room = room
        self._address = address_of(room)
        self._until = _Time()
        if create:
            _init(self._address, 1, 0)
        self.post: Callable[[], int] = partial(_post, self._address)
        self.try_take: Callable[[], int] = partial(_try, self._address)  # returns 0 if there was a post to take

    def wait(self, seconds: float) -> bool:
        """Take one post, waiting for it up to `seconds`. Return False after a time-out or a signal."""
        deadline = time.clock_gettime_ns(time.CLOCK_REALTIME if _CLOCK is None else _CLOCK) + int(seconds * 1e9)
        self._until.seconds, self._until.nanoseconds = divmod(deadline, 1_000_000_000)
        clock = () if _CLOCK is None else (_CLOCK,)
        assert _wait is not None
        return _wait(self._address, *clock, self._until) == 0  # type: ignore[no-any-return]
