"""The start and end of each row, with one clock reading between two rows, for the last runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.action import Op
from penstock.core.lowered_loop import ActionRow
from penstock.engine.observer import Observer

KEEP = 32  # runs
MOST = 1 << 18  # rows of an endless run that are kept

Readings = npt.NDArray[np.int64]  # (begin or end, row)


class TimedRun(NamedTuple):
    """Start and end of all rows of this process's slots, slot after slot, and the number of mini-batches."""

    readings: Readings
    batches: int


class Clock(Observer):
    """Clock readings of the slots of one process, in nanoseconds of its host's monotonic clock.

    A run is a step of synchronous training, or asynchronous training from fill to drain. Time between two calls of the
    executor, such as the user's own code, belongs to no row. A reduction ends when its sums are there, while its slot
    goes on with other rows.
    """

    def __init__(self, slots: tuple[int, ...], keep: int = KEEP, read: Callable[[], int] = perf_counter_ns) -> None:
        self.slots, self.read = slots, read
        self.runs: deque[TimedRun] = deque(maxlen=keep)
        self.done = 0  # runs finished, those no longer kept included
        self.forget()

    def forget(self) -> None:
        """Discard the readings of a failed run, or begin a new one."""
        self.starts: dict[int, list[int]] = {slot: [] for slot in self.slots}
        self.ends: dict[int, list[int]] = {slot: [] for slot in self.slots}
        self.reductions: dict[int, list[tuple[list[int], int]]] = {}  # by stage: ends of a slot, and the place in them

    def begin(self, slot: int) -> None:
        self.start, self.end = self.starts[slot], self.ends[slot]
        if len(self.end) > MOST:
            del self.start[: -MOST // 2], self.end[: -MOST // 2]
        self.now = self.read()

    def after(self, row: ActionRow) -> None:
        self.start.append(self.now)
        self.now = self.read()
        if row.op is Op.REDUCE:
            self.reductions.setdefault(row.stage, []).append((self.end, len(self.end)))
        self.end.append(self.now)

    def reduced(self, stage: int, end: int) -> None:
        for ends, at in self.reductions.pop(stage, ()):
            if at < len(ends):  # of a run that is too long to be kept, the first rows are dropped
                ends[at] = max(ends[at], end)
            self.now = max(self.now, end)  # a row that waits for the sums begins when they are there

    def finish(self, batches: int, rows: int | None = None) -> None:
        """End a run. It is kept only if all of its `rows`, over all slots, were recorded."""
        self.done += 1
        flat = [[reading for slot in self.slots for reading in times[slot]] for times in (self.starts, self.ends)]
        if rows is None or len(flat[0]) == rows:
            self.runs.append(TimedRun(np.array(flat, dtype=np.int64), batches))
        else:
            self.runs.clear()
        self.forget()

    @property
    def first(self) -> int:
        """The number of the first run that is kept."""
        return self.done - len(self.runs)
