"""Timelines of a run on workers: measured, and predicted from earlier steps of the same run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.core.action import Op
from penstock.core.cost import Footprint
from penstock.core.links import FloatArray
from penstock.core.memory import MemoryKind
from penstock.core.schedule import BoolArray, LongArray, Schedule
from penstock.core.timeline import Timeline
from penstock.errors import InputError
from penstock.simulator.simulate import simulate_costs
from penstock.training.measurement.row_costs import Timed


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of one rank in bytes: predicted from the schedule and measured tensors, and measured as a whole."""

    predicted: float
    measured: float


@dataclass(frozen=True, eq=False)
class Measured:
    """Start and end of every row of the kept steps, in seconds on one clock: (steps, rows).

    Before the update all ranks exchange the loss and the norm, which may block until the last rank has come. So an
    update's row begins when the last rank has done its other rows. `first` is the number of the first step kept,
    `recompute` tells which stages run forwards again, `added` is the bytes of training on each rank beside its weights.
    """

    schedule: Schedule
    start: FloatArray
    end: FloatArray
    first: int
    recompute: BoolArray
    footprint: Footprint
    added: FloatArray

    def timeline(self, step: int = -1) -> Timeline:
        """Return one of the kept steps, by default the last, from the moment when some rank begins to work on it.

        The wait of ranks that have ended the step before is no part of it.
        """
        start, end = self.start[step], self.end[step]
        working = ~np.isin(self.schedule.rows.op, (Op.RECV_F, Op.RECV_B))
        begun = start[working].min()
        start, end = np.maximum(start - begun, 0.0), np.maximum(end - begun, 0.0)
        return Timeline(self.schedule, *paired(self.schedule, start, end), measured=True)

    def predicted(self, steps: slice | None = None) -> Timeline:
        """Simulate the schedule with the times of stages and transfers in some of the kept steps.

        By default those of the usual steps before the last: the middle half by length, without the first of the run.
        """
        every = np.arange(len(self.start))
        chosen = self._usual(every[:-1]) if steps is None else every[steps]
        if not len(chosen):
            raise InputError("steps to predict from", "none before the last", "train at least two steps")
        timed = Timed(self.schedule, self.start[chosen], self.end[chosen], self.recompute)
        return _met(simulate_costs(self.schedule, timed.costs(self.footprint)))

    def memory(self) -> list[RankMemory]:
        """Return the peak of every rank over all steps but the first, or of the first where it was the only one."""
        memory = self.predicted(slice(None)).memory  # bytes follow from the order of rows, whatever their times
        assert memory is not None
        measured = memory.standing[MemoryKind.WEIGHTS] + self.added
        pairs = zip(memory.peak(self.schedule).tolist(), measured.tolist(), strict=True)
        return [RankMemory(predicted, peak) for predicted, peak in pairs]

    def _usual(self, steps: LongArray) -> LongArray:
        steps = steps[1:] if self.first == 0 and len(steps) > 1 else steps
        by_length = sorted(steps.tolist(), key=lambda step: self.timeline(step).makespan)
        quarter = len(steps) // 4
        return np.array(by_length[quarter : len(steps) - quarter], dtype=np.int64)


def _met(line: Timeline) -> Timeline:
    """Return a timeline whose updates wait for the last rank, which no row of a schedule expresses."""
    update, slot = line.schedule.rows.op == Op.UPDATE, line.schedule.slot_of_rows()
    done = np.zeros(line.schedule.shape.slots)
    np.maximum.at(done, slot[~update], line.end[~update])
    late = np.where(update, (done.max() - done)[slot], 0.0)
    return replace(line, start=line.start + late, end=line.end + late)


def paired(schedule: Schedule, start: FloatArray, end: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return times in which both rows of an overlapped pair span the whole pair."""
    pair = np.flatnonzero(schedule.rows.op == Op.FB)
    start, end = start.copy(), end.copy()
    start[pair + 1], end[pair] = start[pair], end[pair + 1]
    return start, end
