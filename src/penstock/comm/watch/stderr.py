"""Output of a process that is about to end: messages in one piece, and the main thread's stack."""

from __future__ import annotations

import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path


def say(text: str) -> None:
    """On standard error, in one write, so that the words of several ranks do not mix."""
    with suppress(OSError, ValueError, AttributeError):  # closed, or not there: nothing more can be done
        sys.stderr.write(text)
        sys.stderr.flush()


def flush() -> None:
    """What the program has printed, unless somebody holds on to it."""

    def both() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()

    thread = threading.Thread(target=both, daemon=True)
    thread.start()
    thread.join(0.5)


_HERE = str(Path(__file__).parent)  # the watch itself is of no interest
DEEPEST = 12  # innermost calls that are shown


def main_stack() -> str:
    """The innermost Python calls of the main thread, from any thread."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    frames = traceback.extract_stack(frame) if frame is not None else []
    theirs = [one for one in frames if not one.filename.startswith(_HERE)]
    return "".join(traceback.format_list(theirs[-DEEPEST:]))
