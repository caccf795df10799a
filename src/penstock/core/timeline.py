"""Timelines: start and end of every action, of a predicted or a measured run.

Both kinds of run have the same type, so that they can be compared and every report works for both.

Idle time is counted in two ways. The *barrier view* counts from the first start to the last end on any slot, because a
step that ends in clipping or a NaN check ends on all ranks at once. A rank's *own view* counts between its own first
and last action.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.core.action import Op
from penstock.core.arguments import named_fields
from penstock.core.check import check
from penstock.core.cost import Costs
from penstock.core.links import FloatArray
from penstock.core.memory import ACTIVATION_KINDS, MemoryUse, most_versions
from penstock.core.pace import Pace, pace
from penstock.core.schedule import BoolArray, Schedule
from penstock.core.validation import column, from_json_of, truth
from penstock.errors import InputError


@named_fields
@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end seconds of every row of a lowered schedule.

    A send lasts while its tensor occupies the link, a receive while its slot waits. Memory is derived from the costs of
    a prediction, or was recorded.
    """

    schedule: Schedule
    start: FloatArray
    end: FloatArray
    measured: bool = False
    costs: Costs | None = None
    recorded: MemoryUse | None = None

    @cached_property
    def memory(self) -> MemoryUse | None:
        """Bytes by kind, or None if unknown."""
        if self.recorded is None and self.costs is not None:
            return MemoryUse.predicted(self.schedule, self.costs)
        return self.recorded

    @property
    def peak_activations(self) -> FloatArray:
        """Peak activations of every slot: kept by forwards, kept for weight gradients, and recomputed."""
        memory = self.memory
        return np.zeros(self.schedule.shape.slots) if memory is None else memory.peak(self.schedule, ACTIVATION_KINDS)

    @cached_property
    def weight_versions(self) -> FloatArray:
        """Largest number of weight versions that every slot holds at once."""
        return most_versions(self.schedule)

    @cached_property
    def _busy(self) -> BoolArray:
        """Mask of the rows during which a slot computes; the forward of an overlapped pair includes its backward."""
        op = self.schedule.rows.op
        busy: BoolArray = (op <= Op.FB) | (op == Op.UPDATE)
        busy[1:] &= op[:-1] != Op.FB
        return busy

    @property
    def makespan(self) -> float:
        return float(self.end.max() - self.start.min()) if len(self.end) else 0.0

    @cached_property
    def work(self) -> FloatArray:
        """Seconds of compute, by slot."""
        seconds = np.where(self._busy, self.end - self.start, 0.0)
        return self._per_slot(seconds)

    def _per_slot(self, by_row: FloatArray) -> FloatArray:
        return np.bincount(self.schedule.slot_of_rows(), by_row, self.schedule.shape.slots).astype(np.float64)

    @property
    def idle(self) -> FloatArray:
        """Idle seconds by slot in the barrier view: makespan minus work."""
        return self.makespan - self.work

    @cached_property
    def idle_own(self) -> FloatArray:
        """Idle seconds by slot in its own view: between its first and last compute action."""
        slots = self.schedule.slot_of_rows()
        busy = self._busy & (self.schedule.rows.op <= Op.FB)
        slot = slots[busy]
        first = np.full(self.schedule.shape.slots, np.inf)
        last = np.full(self.schedule.shape.slots, -np.inf)
        np.minimum.at(first, slot, self.start[busy])
        np.maximum.at(last, slot, self.end[busy])
        between = self._busy & (self.end <= last[slots])  # updates between two mini-batches are work, not idle time
        worked = self._per_slot(np.where(between, self.end - self.start, 0.0))
        return np.where(last >= first, last - first - worked, 0.0)

    @property
    def utilisation(self) -> float:
        """Share of slots that are busy, as a mean over the makespan."""
        return float(self.work.mean() / self.makespan) if self.makespan > 0 else 1.0

    @property
    def bubble(self) -> float:
        return 1.0 - self.utilisation

    @cached_property
    def pace(self) -> Pace | None:
        """Time of one mini-batch in the steady state, or None if the run is too short for one."""
        return pace(self.schedule, self.start, self.end, self.work)

    def figures(self) -> dict[str, Any]:
        """Return the main figures as plain numbers; lists have one entry per slot."""
        return {
            "makespan": self.makespan,
            "batches": self.schedule.shape.batches,
            "pace": None if self.pace is None else asdict(self.pace),
            "idle": self.idle.tolist(),
            "idle_own": self.idle_own.tolist(),
            "bubble": self.bubble,
            "utilisation": self.utilisation,
            "work": self.work.tolist(),
            "peak_activations": self.peak_activations.tolist(),
            "weight_versions": self.weight_versions.astype(int).tolist(),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "timeline": self.schedule.to_json(),
            "start": self.start.tolist(),
            "end": self.end.tolist(),
            "measured": self.measured,
            "memory": None if self.memory is None else self.memory.to_json(),
        }

    @classmethod
    @from_json_of("timeline")
    def from_json(cls, data: dict[str, Any]) -> Timeline:
        schedule = Schedule.from_json(data["timeline"])
        _require_whole(schedule)
        start, end = (column(name, data[name], len(schedule)) for name in ("start", "end"))
        early = np.flatnonzero(end < start)
        if len(early):
            came = f"{schedule.action(int(early[0]))}, which ends before"
            raise InputError("actions that end no earlier than they start", came, "correct start and end")
        slots, memory = schedule.shape.slots, data["memory"]
        recorded = None if memory is None else MemoryUse.from_json(memory, slots, len(schedule))
        return cls(schedule, start, end, truth("measured", data["measured"]), recorded=recorded)


def _require_whole(schedule: Schedule) -> None:
    """Raise InputError for an unsound schedule, because reports and figures rely on its laws."""
    if not schedule.lowered:
        raise InputError("a timeline of a lowered schedule", "one without transfers", "write it with to_json")
    report = check(schedule)
    if len(schedule) and not report.ok:
        raise InputError("a timeline of a sound schedule", str(report.faults[0]), "write it with to_json")
