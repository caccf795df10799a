"""Memory that two processes share: an anonymous file, mapped piece by piece.

The file has no name anywhere, so nothing can be left behind: the kernel frees it when the last process that has it
open or mapped ends, however it ends. The mappings are made by hand because those of `mmap.mmap` keep one file
descriptor each.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
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


def is_there() -> bool:
    """Whether this system has what shared memory is made of here: Linux has, others have not all of it."""
    return hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate") and _fallocate is not None


def create(name: str) -> int:
    """A new file in memory; only this process has it open. The name is for people who look into /proc."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def allocate(file: int, offset: int, size: int) -> None:
    """Have real memory for a piece of the file, or raise OSError: written to without, it would end the process."""
    if size > available():
        raise OSError(errno.ENOMEM, f"{size} bytes asked for shared memory, {available()} available")
    os.posix_fallocate(file, offset, size)


def free(file: int, offset: int, size: int) -> None:
    """Give the memory of a piece back. Where it is mapped, it reads as zeros from now on."""
    assert _fallocate is not None
    _fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, offset, size)


def map_piece(file: int, offset: int, size: int) -> memoryview:
    """A piece of the file as writable bytes, its pages in place already; unmapped when nobody holds a view of it."""
    if offset < 0 or size <= 0 or offset + size > os.fstat(file).st_size:  # beyond the end, touching it would kill
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
    """Bytes that can be had without ending some process; unknown counts as plenty."""
    try:
        with Path("/proc/meminfo").open() as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62
