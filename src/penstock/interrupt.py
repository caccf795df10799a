"""Ctrl-C while torch loads, which takes seconds: a process ends at once, and without a word.

What native code imports may swallow KeyboardInterrupt, and the process would go on as if nobody had asked.
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
def ending_amid_imports() -> Iterator[None]:
    """Around a program. Before torch's import and after it, Python's own handler has its say."""
    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _handler)
    try:
        yield
    finally:
        if ours and signal.getsignal(signal.SIGINT) is _handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _handler(number: int, frame: FrameType | None) -> None:
    if _loading():
        os._exit(128 + number)
    signal.default_int_handler(number, frame)


def _loading() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
