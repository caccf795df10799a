"""Ctrl-C while torch is imported, which takes seconds: the process exits at once, without a traceback.

Native code that imports Python modules may discard a KeyboardInterrupt, and the process would continue.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def exit_on_interrupt_during_imports() -> Iterator[None]:
    """Exit at once on Ctrl-C while torch is imported. At any other time Python's own handler runs."""
    is_ours = threading.current_thread() is threading.main_thread()
    is_ours = is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, _handler)
    try:
        yield
    finally:
        if is_ours and signal.getsignal(signal.SIGINT) is _handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _handler(number: int, frame: FrameType | None) -> None:
    if _importing_torch():
        os._exit(128 + number)
    signal.default_int_handler(number, frame)


def _importing_torch() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
