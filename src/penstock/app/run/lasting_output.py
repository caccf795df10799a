"""Output of a long run that may fail without ending the run: a closed pipe or a full disk must not cost hours of
training."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from typing import TextIO, cast

from penstock.comm.watch.stderr import write_stderr


class LastingOutput(io.TextIOBase):
    """A stream that may fail. The first failure is reported on standard error; later output is discarded."""

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
        write_stderr(
            f"penstock: {self.name} cannot be written to ({error.strerror}); the training goes on without it\n"
        )


def discard(stream: TextIO) -> None:
    """Redirect a stream to the null device, with its buffered output, so that the process does not fail to flush it at
    its end."""
    with suppress(OSError, ValueError):  # a stream without a file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
