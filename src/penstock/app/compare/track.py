"""How a run went, mini-batch by mini-batch, as far as it came: also if it ends in an error, or in another process."""

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
    """Losses, and the seconds from the begin at which each was known; `show` is told of every one, and so is `out`, a
    file in which another process finds them under the run's number."""

    show: Show | None = None
    out: TextIO | None = None
    number: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    begun: float = 0.0

    def begin(self) -> None:
        self.begun = perf_counter()

    def note(self, loss: float) -> None:
        self.take(loss, perf_counter() - self.begun)
        if self.out is not None:
            print(self.number, loss, self.seconds[-1], file=self.out, flush=True)

    def take(self, loss: float, seconds: float) -> None:
        """What was noted here, or by another process."""
        self.losses.append(loss)
        self.seconds.append(seconds)
        if self.show is not None:
            self.show(len(self.losses), loss)


@contextmanager
def following(file: Path, take: Callable[[str], None]) -> Iterator[None]:
    """Meanwhile another process writes lines into a file: they are taken as they come, at the end all of them."""
    file.touch()
    ended = threading.Event()

    def follow(notes: TextIO) -> None:
        rest, last = "", False
        while not last:
            last = ended.wait(TICK)
            *lines, rest = (rest + notes.read()).split("\n")
            for line in lines:
                take(line)

    with file.open(encoding="utf-8") as notes:
        thread = threading.Thread(target=follow, args=(notes,), name="penstock-notes")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
