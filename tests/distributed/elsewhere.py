"""A rank of train_rank.py on a system without what only Linux has: taken away before penstock is loaded.

PENSTOCK_TEST_LINUX=1 leaves everything where it is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import runpy
import signal
import sys
from pathlib import Path

MISSING = {
    os: ("memfd_create", "pidfd_open", "sched_getaffinity", "posix_fallocate", "waitid", "eventfd"),
    signal: ("pidfd_send_signal",),
    mmap: ("MAP_POPULATE",),
}
LIBRARY = ("prctl", "fallocate", "sem_clockwait", "sem_timedwait", "malloc_trim", "mallopt", "futex")


def take_away() -> None:
    for module, names in MISSING.items():
        for name in names:
            vars(module).pop(name, None)
    for kind in (ctypes.CDLL, ctypes.PyDLL):
        _hide(kind)
    _hide_proc()


def _hide(kind: type) -> None:
    plain = kind.__getattr__

    def found(library, name):
        if library._name is None and name in LIBRARY:
            raise AttributeError(name)
        return plain(library, name)

    kind.__getattr__ = found


def _hide_proc() -> None:
    """No file below /proc, neither for Path nor for os.open."""
    exists, opened, path_open, low = Path.exists, Path.read_text, Path.open, os.open

    def refuse(path):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(path))

    def read_text(path, *words, **more):
        refuse(path)
        return opened(path, *words, **more)

    def open_path(path, *words, **more):
        refuse(path)
        return path_open(path, *words, **more)

    def open_low(path, *words, **more):
        refuse(path)
        return low(path, *words, **more)

    Path.exists = lambda path, **more: not str(path).startswith("/proc") and exists(path, **more)
    Path.read_text, Path.open, os.open = read_text, open_path, open_low


if __name__ == "__main__":
    if not os.environ.get("PENSTOCK_TEST_LINUX"):
        take_away()
    runpy.run_path(str(Path(__file__).with_name("train_rank.py")), run_name="__main__")
    sys.stdout.flush()
