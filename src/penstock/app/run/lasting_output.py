"""What a long run says: lost, in the end, if nobody can take it, and the run goes on.

A pipe whose reader has left, or a file on a disk that is full, must not cost hours of training.
"""

from __future__ import annotations

import io
import os
from contextlib import suppress
from typing import TextIO, cast

from penstock.comm.watch.stderr import say


class LastingOutput(io.TextIOBase):
    """A stream that may fail once: it is then said on standard error, and everything after it goes nowhere."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self.stream, self.name = stream, name
        self.failed = False

    @property
    def text(self) -> TextIO:
        return cast(TextIO, self)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    def isatty(self) -> bool:
        return self.stream.isatty()

    def write(self, text: str) -> int:
        if not self.failed:
            try:
                self.stream.write(text)
            except OSError as error:
                self._fail(error)
        return len(text)

    def flush(self) -> None:
        if not self.failed:
            try:
                self.stream.flush()
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failed = True
        discard(self.stream)
        say(f"penstock: {self.name} cannot be written to ({error.strerror}); the training goes on without it\n")


def discard(stream: TextIO) -> None:
    """Send what a stream still holds, and all that follows, nowhere: else the end of the process tries it once more."""
    with suppress(OSError, ValueError):  # of no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()
