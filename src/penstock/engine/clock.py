"""When each row of a rank began and ended: one reading between two rows, the last steps kept whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns

KEEP = 32  # steps


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
