"""Where the main thread is."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path

_HERE = str(Path(__file__).parent)  # the watch itself is of no interest
DEEPEST = 12  # innermost calls that are shown


def main_stack() -> str:
    """The innermost Python calls of the main thread, from any thread."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    frames = traceback.extract_stack(frame) if frame is not None else []
    theirs = [one for one in frames if not one.filename.startswith(_HERE)]
    return "".join(traceback.format_list(theirs[-DEEPEST:]))
