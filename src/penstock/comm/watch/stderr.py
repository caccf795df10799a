"""Output of a process that is about to end: whole messages, and the main thread's stack."""

from __future__ import annotations

import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path


def write_stderr(text: str) -> None:
    """Write to standard error in one call, so that the lines of several ranks do not mix."""
    with suppress(OSError, ValueError, AttributeError):  # closed or missing: nothing more can be done
        sys.stderr.write(text)
        sys.stderr.flush()


def flush() -> None:
    """Flush the program's output, for at most half a second."""

    def both() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()

    thread = threading.Thread(target=both, daemon=True)
    thread.start()
    thread.join(0.5)


_HERE = str(Path(__file__).parent)  # frames of the watch itself are left out
DEEPEST = 12  # innermost calls that are shown


def main_stack() -> str:
    """Return the innermost Python calls of the main thread, from any thread."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    frames = traceback.extract_stack(frame) if frame is not None else []
    user_frames = [one for one in frames if not one.filename.startswith(_HERE)]
    return "".join(traceback.format_list(user_frames[-DEEPEST:]))
