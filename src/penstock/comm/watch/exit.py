"""The end of a rank's process: an uncaught exception is told to the others, a normal end too."""

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


def install(watch: Watch, part: Callable[[], None]) -> None:
    """`part` closes the connections of a rank that has nothing left to do."""
    pid, before = os.getpid(), sys.excepthook
    interrupted = False

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal interrupted
        if os.getpid() != pid:
            before(kind, error, trace)
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        if before is not sys.__excepthook__ and not isinstance(error, RankError) and error is not watch.shown:
            before(kind, error, trace)  # the user's own way to show it
            watch.shown = error
        watch.failed(error)
        watch.uncaught()
        if error is watch.shown:
            return
        if not isinstance(error, (PenstockError, KeyboardInterrupt)):
            before(kind, error, trace)
        watch.say_why()

    def leave() -> None:
        if os.getpid() != pid:
            return
        watch.finished()
        if watch.failure is None:
            return part()
        watch.leave_no_silent()
        logging.shutdown()
        flush()
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(pid, signal.SIGINT)
        watch.after_the_first()
        os._exit(watch.code)  # connections to ranks that failed can make a normal end wait

    sys.excepthook = hook
    atexit.register(leave)
