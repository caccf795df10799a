"""When each row of a rank began and ended: one reading between two rows, the last steps kept whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns

KEEP = 32  # steps
MOST = 1 << 18  # rows of a run without end that are kept


class Clock:
    """Readings of one rank, in nanoseconds of its host's monotonic clock.

    Of a step: its begin, each row's end, then the begin and the end of the update.
    """

    def __init__(self, keep: int = KEEP, read: Callable[[], int] = perf_counter_ns) -> None:
        self.steps: deque[list[int]] = deque(maxlen=keep)
        self.read = read
        self.now: list[int] = []
        self.done = 0  # steps, those no longer kept included

    def begin(self) -> None:
        self.now = [self.read()]

    def tick(self) -> None:
        self.now.append(self.read())

    def end(self) -> None:
        """The step is over, its update too."""
        self.steps.append(self.now)
        self.done += 1

    @property
    def first(self) -> int:
        """The number of the first step that is kept."""
        return self.done - len(self.steps)


class RunClock:
    """When each row of a run without a flush began and ended, as long as it is not too long to keep.

    Rows come in passes, between which the user's own code runs: that is no row's time.
    """

    def __init__(self, read: Callable[[], int] = perf_counter_ns) -> None:
        self.read = read
        self.start: list[int] = []
        self.end: list[int] = []
        self.last: tuple[list[int], list[int], int] | None = None  # of the last whole run, and its mini-batches

    def forget(self) -> None:
        """A run begins; of one that failed nothing counts."""
        self.start, self.end = [], []

    def begin(self) -> None:
        """A pass begins."""
        self.now = self.read()

    def tick(self) -> None:
        """A row has ended, and the next one begins."""
        self.start.append(self.now)
        self.now = self.read()
        self.end.append(self.now)
        if len(self.end) > MOST:
            self.start, self.end = self.start[-MOST // 2 :], self.end[-MOST // 2 :]

    def finish(self, batches: int, rows: int) -> None:
        """The run is over: so many mini-batches, and so many rows."""
        whole = len(self.end) == rows
        self.last = (self.start, self.end, batches) if whole else None
        self.start, self.end = [], []
