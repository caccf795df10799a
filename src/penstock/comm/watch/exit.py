"""The end of a rank's process: report an uncaught exception, or a normal end, to the other ranks."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType

from penstock.comm.watch.stderr import flush
from penstock.comm.watch.watch import Watch
from penstock.errors import PenstockError, RankError


def install(watch: Watch, disconnect: Callable[[], None]) -> None:
    """Install the exception hook and the exit handler. `disconnect` closes the connections of a rank that ends
    normally."""
    pid, before = os.getpid(), sys.excepthook
    interrupted = False

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal interrupted
        if os.getpid() != pid:
            before(kind, error, trace)
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        if before is not sys.__excepthook__ and not isinstance(error, RankError) and error is not watch.shown:
            before(kind, error, trace)  # the user's own hook prints it
            watch.shown = error
        watch.failed(error)
        watch.uncaught()
        if error is watch.shown:
            return
        if not isinstance(error, (PenstockError, KeyboardInterrupt)):
            before(kind, error, trace)
        watch.print_reason()

    def leave() -> None:
        if os.getpid() != pid:
            return
        watch.finished()
        if watch.failure is None:
            return disconnect()
        watch.kill_silent_ranks()
        logging.shutdown()
        flush()
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(pid, signal.SIGINT)
        watch.let_cause_end_first()
        os._exit(watch.code)  # a normal end could wait for connections to ranks that failed

    sys.excepthook = hook
    atexit.register(leave)
