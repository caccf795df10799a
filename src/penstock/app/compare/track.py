"""The losses and times of a run by mini-batch, available even if it ends in an error or runs in another process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TextIO

from penstock.app.run.progress import Show

TICK = 0.2  # seconds


@dataclass
class Track:
    """Losses, and the seconds from the start of the run to each. Each is passed to `show`, and written to `out`, a file
    in which another process reads them under the run's number."""

    show: Show | None = None
    out: TextIO | None = None
    number: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    begun: float = 0.0

    def begin(self) -> None:
        self.begun = perf_counter()

    def record(self, loss: float) -> None:
        self.add(loss, perf_counter() - self.begun)
        if self.out is not None:
            print(self.number, loss, self.seconds[-1], file=self.out, flush=True)

    def add(self, loss: float, seconds: float) -> None:
        """Add a loss that was recorded here or in another process."""
        self.losses.append(loss)
        self.seconds.append(seconds)
        if self.show is not None:
            self.show(len(self.losses), loss)


@contextmanager
def follow_lines(file: Path, add: Callable[[str], None]) -> Iterator[None]:
    """Pass on the lines that another process writes to a file, as they come; all of them at the end."""
    file.touch()
    ended = threading.Event()

    def follow(notes: TextIO) -> None:
        rest, last = "", False
        while not last:
            last = ended.wait(TICK)
            *lines, rest = (rest + notes.read()).split("\n")
            for line in lines:
                add(line)

    with file.open(encoding="utf-8") as notes:
        thread = threading.Thread(target=follow, args=(notes,), name="penstock-notes")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
