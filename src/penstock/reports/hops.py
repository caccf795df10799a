"""Transfers as arrows between the lines of slots, with the actions that produce and use the tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.action import Op
from penstock.core.links import FloatArray
from penstock.core.schedule import LongArray, Schedule
from penstock.core.shape import IntArray
from penstock.core.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Hops:
    """Transfers, one per send, ordered by start. `maker` and `user` are rows of the schedule, -1 for none."""

    row: LongArray
    source: IntArray  # slots
    target: IntArray
    start: FloatArray
    end: FloatArray
    maker: LongArray
    user: LongArray

    def __len__(self) -> int:
        return len(self.row)


def hops(timeline: Timeline) -> Hops:
    """Return the transfers of a timeline, with times from its start."""
    schedule = timeline.schedule
    rows, shape = schedule.rows, schedule.shape
    row = np.flatnonzero((rows.op == Op.SEND_F) | (rows.op == Op.SEND_B))
    row = row[np.argsort(timeline.start[row], kind="stable")]
    source = schedule.slot_of_rows()[row]
    target = shape.first_slot[shape.stage_rank[rows.peer[row]]] + rows.replica[row]
    backward = (rows.op[row] == Op.SEND_B).astype(np.int64)
    origin = timeline.start.min() if len(timeline.start) else 0.0
    find = _Finder(schedule)
    return Hops(
        row=row,
        source=source,
        target=target.astype(np.int32),
        start=timeline.start[row] - origin,
        end=timeline.end[row] - origin,
        maker=find(source, rows.stage[row], rows.microbatch[row], backward),
        user=find(target, rows.peer[row], rows.microbatch[row], backward),
    )


class _Finder:
    """Lookup of the row in which a slot runs a stage's forward (way 0) or backward (way 1) of a micro-batch."""

    def __init__(self, schedule: Schedule) -> None:
        self.shape, op = schedule.shape, schedule.rows.op
        forward, backward = (op == Op.F) | (op == Op.FB), (op == Op.B) | (op == Op.I)
        row = np.flatnonzero(forward | backward)
        slot, rows = schedule.slot_of_rows()[row], schedule.rows.take(row)
        key = self._key(slot, rows.stage, rows.microbatch, backward[row].astype(np.int64))
        order = np.argsort(key, kind="stable")
        joined = np.concatenate(([False], op[:-1] == Op.FB)) if len(op) else np.zeros(0, dtype=np.bool_)
        self.keys = key[order]
        self.rows = (row - joined[row])[order]  # an overlapped pair is one action, at its first row

    def _key(self, slot: IntArray, stage: IntArray, microbatch: IntArray, way: LongArray) -> LongArray:
        place = slot.astype(np.int64) * self.shape.stages + stage
        key: LongArray = (place * self.shape.total + microbatch) * 2 + way
        return key

    def __call__(self, slot: IntArray, stage: IntArray, microbatch: IntArray, way: LongArray) -> LongArray:
        if not len(self.keys):
            return np.full(len(slot), -1, dtype=np.int64)
        key = self._key(slot, stage, microbatch, way)
        at = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        return np.where(self.keys[at] == key, self.rows[at], -1)
