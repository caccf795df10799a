"""When everything happened: the same type for a prediction and for a measured run, so that one can be taken from the
other and every report serves both.

Two views of idleness, always both: the *barrier view* counts from the first start to the last end anywhere, because a
step that ends in clipping or a NaN check ends for all at once; a rank's *own view* counts between its own first and
last action.
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
from penstock.core.given import column, from_json_of, truth
from penstock.core.links import FloatArray
from penstock.core.memory import ACTIVATION_KINDS, Memory, most_versions
from penstock.core.pace import Pace, pace
from penstock.core.schedule import BoolArray, Schedule
from penstock.errors import InputError


@named_fields
@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end seconds of every row of a lowered schedule.

    A send spans its stay on the link, a receive the slot's wait for it. Memory comes from the costs of a prediction,
    or was recorded.
    """

    schedule: Schedule
    start: FloatArray
    end: FloatArray
    measured: bool = False
    costs: Costs | None = None
    recorded: Memory | None = None

    @cached_property
    def memory(self) -> Memory | None:
        """Bytes by kind, or None where nobody counted."""
        if self.recorded is None and self.costs is not None:
            return Memory.predicted(self.schedule, self.costs)
        return self.recorded

    @property
    def peak_activations(self) -> FloatArray:
        """The most activations every slot holds: of forwards, of weight gradients to come, and recomputed ones."""
        memory = self.memory
        return np.zeros(self.schedule.shape.slots) if memory is None else memory.peak(self.schedule, ACTIVATION_KINDS)

    @cached_property
    def weight_versions(self) -> FloatArray:
        """The most weight versions alive on every slot."""
        return most_versions(self.schedule)

    @cached_property
    def _busy(self) -> BoolArray:
        """Rows during which a slot computes; the backward of an overlapped pair is counted with its forward."""
        op = self.schedule.rows.op
        busy: BoolArray = (op <= Op.FB) | (op == Op.UPDATE)
        busy[1:] &= op[:-1] != Op.FB
        return busy

    @property
    def makespan(self) -> float:
        return float(self.end.max() - self.start.min()) if len(self.end) else 0.0

    @cached_property
    def work(self) -> FloatArray:
        """Seconds of compute of every slot."""
        seconds = np.where(self._busy, self.end - self.start, 0.0)
        return self._per_slot(seconds)

    def _per_slot(self, by_row: FloatArray) -> FloatArray:
        return np.bincount(self.schedule.slot_of_rows(), by_row, self.schedule.shape.slots).astype(np.float64)

    @property
    def idle(self) -> FloatArray:
        """Barrier view: makespan minus work, of every slot."""
        return self.makespan - self.work

    @cached_property
    def idle_own(self) -> FloatArray:
        """Own view: between a slot's own first and last compute action."""
        slots = self.schedule.slot_of_rows()
        busy = self._busy & (self.schedule.rows.op <= Op.FB)
        slot = slots[busy]
        first = np.full(self.schedule.shape.slots, np.inf)
        last = np.full(self.schedule.shape.slots, -np.inf)
        np.minimum.at(first, slot, self.start[busy])
        np.maximum.at(last, slot, self.end[busy])
        between = self._busy & (self.end <= last[slots])  # updates between two mini-batches are work, not idleness
        worked = self._per_slot(np.where(between, self.end - self.start, 0.0))
        return np.where(last >= first, last - first - worked, 0.0)

    @property
    def utilisation(self) -> float:
        """The share of slots that are busy, on average over the makespan."""
        return float(self.work.mean() / self.makespan) if self.makespan > 0 else 1.0

    @property
    def bubble(self) -> float:
        return 1.0 - self.utilisation

    @cached_property
    def pace(self) -> Pace | None:
        """One mini-batch of the steady state; None where the run is too short to have one."""
        return pace(self.schedule, self.start, self.end, self.work)

    def figures(self) -> dict[str, Any]:
        """The figures people compare, as plain numbers; lists have one entry a slot."""
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
        recorded = None if memory is None else Memory.from_json(memory, slots, len(schedule))
        return cls(schedule, start, end, truth("measured", data["measured"]), recorded=recorded)


def _require_whole(schedule: Schedule) -> None:
    """Refuse a schedule that nobody can have run: reports and figures rely on its laws."""
    if not schedule.lowered:
        raise InputError("a timeline of a lowered schedule", "one without transfers", "write it with to_json")
    report = check(schedule)
    if len(schedule) and not report.ok:
        raise InputError("a timeline of a sound schedule", str(report.faults[0]), "write it with to_json")
