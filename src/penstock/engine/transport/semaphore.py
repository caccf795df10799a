"""A semaphore of the C library that lies in shared memory: one process posts, another waits."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial

from penstock.engine.transport.memory import address_of

BYTES = 64  # more than any C library's sem_t


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_quick = ctypes.PyDLL(None)  # keeps the interpreter's lock: for calls that never wait
_slow = ctypes.CDLL(None)
_init, _post, _try = _quick.sem_init, _quick.sem_post, _quick.sem_trywait
_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
_post.argtypes = _try.argtypes = [ctypes.c_void_p]
_CLOCK: int | None = time.CLOCK_MONOTONIC if hasattr(_slow, "sem_clockwait") else None
_wait = getattr(_slow, "sem_timedwait" if _CLOCK is None else "sem_clockwait", None)  # macOS has neither
if _CLOCK is None and _wait is not None:  # C libraries that know only the wall clock, which somebody may set back
    _wait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Time)]
elif _wait is not None:
    _wait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Time)]


def is_there() -> bool:
    """Whether the C library has such semaphores."""
    return _wait is not None


class Semaphore:
    """In BYTES of shared memory, which it keeps alive. One end creates, before any other use."""

    def __init__(self, room: memoryview, create: bool) -> None:
        self._room = room
        self._address = address_of(room)
        self._until = _Time()
        if create:
            _init(self._address, 1, 0)
        self.post: Callable[[], int] = partial(_post, self._address)
        self.try_take: Callable[[], int] = partial(_try, self._address)  # 0: took one post; else there was none

    def wait(self, seconds: float) -> bool:
        """One post, waiting for it as long; False also when a signal came in between."""
        now = time.clock_gettime_ns(time.CLOCK_REALTIME if _CLOCK is None else _CLOCK) + int(seconds * 1e9)
        self._until.seconds, self._until.nanoseconds = divmod(now, 1_000_000_000)
        known = () if _CLOCK is None else (_CLOCK,)
        assert _wait is not None
        return _wait(self._address, *known, self._until) == 0  # type: ignore[no-any-return]
