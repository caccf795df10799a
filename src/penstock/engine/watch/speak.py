"""Words to the user's terminal, each in one piece, from a process that is about to end."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress


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
