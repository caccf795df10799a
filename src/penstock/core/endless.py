"""The full list of a loop, transfers and updates included, for a run whose length nobody knows yet.

One unrolled run that is long enough holds everything: its first passes, in which versions below 0 still read 0; one
steady pass, of which every later one is a copy with greater numbers; and the drain. So nothing is lowered twice, and
what was proven of that run holds for a longer one, which only repeats the steady pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from penstock.core.action import Op
from penstock.core.check import Proven, prove
from penstock.core.loop import Loop
from penstock.core.schedule import Rows, Schedule
from penstock.core.shape import IntArray, Shape

FOREVER = 2**31 - 1  # a version that no forward names


class Row(NamedTuple):
    """One row of a slot's list; `peer` is the stage at the other end of a transfer."""

    op: Op
    stage: int
    microbatch: int
    version: int
    peer: int


@dataclass(frozen=True, eq=False)
class Endless:
    """A loop's rows with transfers and updates: pass by pass, then the rest."""

    loop: Loop

    @property
    def shape(self) -> Shape:
        return self.loop.shape

    @cached_property
    def steady(self) -> int:
        """The first pass whose versions all exist: every later one is a copy of it."""
        step = self.loop.version_step()
        late = [
            -(-max(0, -int(v)) // int(step[s])) for b in self.loop.body for s, v in zip(b.stage, b.version, strict=True)
        ]
        return max(late, default=0)

    @cached_property
    def least(self) -> int:
        """Mini-batches of the shortest run that has a steady pass."""
        return self.fed(self.steady + 1)

    def fed(self, passes: int) -> int:
        """Mini-batches that have begun somewhere after so many passes."""
        per_pass = self.loop.period * self.shape.microbatches
        begun = [
            max(
                int(fill.microbatch.max(initial=-1)),
                int(body.microbatch.max(initial=-1)) + (passes - 1) * per_pass if passes else -1,
            )
            for fill, body in zip(self.loop.fill, self.loop.body, strict=True)
        ]
        return max(begun) // self.shape.microbatches + 1

    def schedule(self, batches: int) -> Schedule:
        """The plain full list for a run of so many mini-batches."""
        return self.proven(batches).schedule

    @cache  # noqa: B019  # a few short runs, for as long as the loop itself lives
    def proven(self, batches: int) -> Proven:
        """A short run, proven."""
        return prove(self.loop.unroll(batches))

    def fill(self, slot: int) -> list[Row]:
        """Before the first pass."""
        return self._cut(self.least, slot, 0, len(self.loop.fill[slot]))

    def one(self, slot: int, number: int) -> list[Row]:
        """Pass `number` of a slot, of a run that goes on."""
        known = min(number, self.steady)
        return self._shifted(self._early(slot, known), number - known)

    @cache  # noqa: B019  # as above: every pass of a long run is one of these, later
    def _early(self, slot: int, number: int) -> list[Row]:
        """One of the first passes, up to the first steady one."""
        first, length = len(self.loop.fill[slot]), len(self.loop.body[slot])
        return self._cut(self.least, slot, first + number * length, first + (number + 1) * length)

    @cached_property
    def _steps(self) -> list[int]:
        """By stage: versions that a pass adds."""
        return [int(step) for step in self.loop.version_step()]

    def rest(self, slot: int, passes: int, batches: int) -> list[Row]:
        """What is left of a run of so many mini-batches after so many passes; after none, all of it."""
        whole = max(0, min((batches - self.least) // self.loop.period, passes - self.steady))
        short = batches - whole * self.loop.period
        done = len(self.loop.fill[slot]) + (passes - whole) * len(self.loop.body[slot]) if passes else 0
        return self._shifted(self._cut(short, slot, done, None), whole)

    def named(self, stage: int, microbatch: int) -> int:
        """The version that the forward of a micro-batch names on a stage."""
        known = self._named[stage]
        per_pass, step = self.loop.period * self.shape.microbatches, self._steps[stage]
        whole = max(0, -(-(microbatch - len(known) + 1) // per_pass))
        return int(known[microbatch - whole * per_pass]) + whole * step

    def delay(self, stage: int, op: Op = Op.F) -> float:
        """Updates, on average, between the version that a steady forward (or backward) names and the one that its
        gradient is taken from."""
        body, per_batch = self.loop.body[self.shape.slot(stage)], self.shape.microbatches
        mine = (body.op == op) & (body.stage == stage)
        return float((body.microbatch[mine] // per_batch - body.version[mine]).mean()) if mine.any() else 0.0

    @cached_property
    def _named(self) -> list[IntArray]:
        """By stage and micro-batch, of a run that has at least two steady passes."""
        rows = self.loop.unroll(self.fed(self.steady + 2)).rows
        found = []
        for stage in range(self.shape.stages):
            forward = np.isin(rows.op, (Op.F, Op.FB)) & (rows.stage == stage)
            order = np.argsort(rows.microbatch[forward], kind="stable")
            found.append(rows.version[forward][order])
        return found

    def _cut(self, batches: int, slot: int, first: int, last: int | None) -> list[Row]:
        """The rows around a slot's compute actions number `first` to `last`, of a short run."""
        full = self.schedule(batches)
        rows = full.rows.take(slice(int(full.starts[slot]), int(full.starts[slot + 1])))
        begins = _begins(rows)
        end = len(rows) if last is None or last >= len(begins) else int(begins[last])
        begin = len(rows) if first >= len(begins) else int(begins[first])
        return _listed(rows, begin, end)

    def _shifted(self, rows: list[Row], passes: int) -> list[Row]:
        if not passes:
            return rows
        numbers = passes * self.loop.period * self.shape.microbatches
        return [_later(row, numbers, passes * self._steps[row.stage]) for row in rows]


def slot_rows(schedule: Schedule, slot: int) -> list[Row]:
    """Return the whole list of one slot of a lowered schedule."""
    return _listed(schedule.rows, int(schedule.starts[slot]), int(schedule.starts[slot + 1]))


def _listed(rows: Rows, begin: int, end: int) -> list[Row]:
    columns = (column[begin:end].tolist() for column in rows.columns()[:5])
    return [Row(Op(op), *numbers) for op, *numbers in zip(*columns, strict=True)]


def _later(row: Row, numbers: int, versions: int) -> Row:
    microbatch = row.microbatch + numbers if row.microbatch >= 0 else row.microbatch
    named = row.op <= Op.FB or row.op in (Op.REDUCE, Op.UPDATE)
    return row._replace(microbatch=microbatch, version=row.version + versions if named else row.version)


def _begins(rows: Rows) -> IntArray:
    """Where the rows around each compute action begin: with its receives."""
    compute = np.flatnonzero(rows.op <= Op.FB)
    receive = np.isin(rows.op, (Op.RECV_F, Op.RECV_B))
    after = np.concatenate(([0], np.cumsum(~receive)))  # rows that are no receives, before each row
    others = np.flatnonzero(~receive)
    before = after[compute] - 1  # the last such row before the action
    return np.where(before >= 0, others[before] + 1, 0).astype(np.int32)
