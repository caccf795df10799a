"""The rows of a loop with transfers and updates, for a run of unknown length.

A short unrolled run contains all that is needed: its first passes, in which versions below 0 are 0; one steady pass,
which every later pass repeats with greater numbers; and the drain. The short run is lowered and checked once, and its
proof holds for a longer run, which only repeats the steady pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from penstock.core.action import Op
from penstock.core.check import Proven, prove
from penstock.core.loop import Loop
from penstock.core.schedule import Schedule, ScheduleRows
from penstock.core.shape import IntArray, Shape

FOREVER = 2**31 - 1  # a version that no forward names


class ActionRow(NamedTuple):
    """One row of a slot's list. `peer` and `peer_replica` are a transfer's other end, `replica` the slot's own."""

    op: Op
    stage: int
    microbatch: int
    version: int
    peer: int
    peer_replica: int = 0
    replica: int = 0


@dataclass(frozen=True, eq=False)
class LoweredLoop:
    """The rows of a loop with transfers and updates, pass by pass, then the remaining ones."""

    loop: Loop

    @property
    def shape(self) -> Shape:
        return self.loop.shape

    @cached_property
    def steady(self) -> int:
        """The first pass whose versions are all 0 or more; every later pass repeats it."""
        step = self.loop.version_step()
        late = [
            -(-max(0, -int(v)) // int(step[s])) for b in self.loop.body for s, v in zip(b.stage, b.version, strict=True)
        ]
        return max(late, default=0)

    @cached_property
    def least(self) -> int:
        """Number of mini-batches of the shortest run with a steady pass."""
        return self.fed(self.steady + 1)

    def fed(self, passes: int) -> int:
        """Return how many mini-batches have begun on any slot after `passes` passes."""
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
        """Return the lowered schedule of a run of `batches` mini-batches."""
        return self.proven(batches).schedule

    @cache  # noqa: B019  # a few short runs, which live as long as the loop
    def proven(self, batches: int) -> Proven:
        """Return the lowered and checked schedule of a run of `batches` mini-batches."""
        return prove(self.loop.unroll(batches))

    def fill(self, slot: int) -> list[ActionRow]:
        """Return a slot's rows before the first pass."""
        return self._cut(self.least, slot, 0, len(self.loop.fill[slot]))

    def one(self, slot: int, number: int) -> list[ActionRow]:
        """Return a slot's rows of pass `number`, in a run that continues after it."""
        early = min(number, self.steady)
        return self._shifted(self._early(slot, early), number - early)

    @cache  # noqa: B019  # as above: later passes are shifted copies of these
    def _early(self, slot: int, number: int) -> list[ActionRow]:
        """Return a slot's rows of one of the passes up to the first steady one."""
        first, length = len(self.loop.fill[slot]), len(self.loop.body[slot])
        return self._cut(self.least, slot, first + number * length, first + (number + 1) * length)

    @cached_property
    def _steps(self) -> list[int]:
        """Number of versions that a pass adds, by stage."""
        return [int(step) for step in self.loop.version_step()]

    def rest(self, slot: int, passes: int, batches: int) -> list[ActionRow]:
        """Return a slot's remaining rows of a run of `batches` mini-batches, after `passes` passes (0: all rows)."""
        repeated = max(0, min((batches - self.least) // self.loop.period, passes - self.steady))
        short = batches - repeated * self.loop.period
        done = len(self.loop.fill[slot]) + (passes - repeated) * len(self.loop.body[slot]) if passes else 0
        return self._shifted(self._cut(short, slot, done, None), repeated)

    def named(self, stage: int, microbatch: int) -> int:
        """Return the version that the forward of a micro-batch names on a stage."""
        versions = self._named[stage]
        per_pass, step = self.loop.period * self.shape.microbatches, self._steps[stage]
        repeated = max(0, -(-(microbatch - len(versions) + 1) // per_pass))
        return int(versions[microbatch - repeated * per_pass]) + repeated * step

    def first_microbatch(self, stage: int, replica: int) -> int:
        """Return the first micro-batch of a replica."""
        return replica * self.shape.microbatches if self.shape.turns else 0

    def next_microbatch(self, stage: int, microbatch: int) -> int:
        """Return the micro-batch that a replica runs after one; in turns, whole mini-batches are left to others."""
        after, per_batch = microbatch + 1, self.shape.microbatches
        if self.shape.turns and after % per_batch == 0:
            after += (int(self.shape.stage_replicas[stage]) - 1) * per_batch
        return after

    def mini_batches_of(self, stage: int, version: int) -> range:
        """Return the mini-batches whose gradients make a version of a stage, in a run that goes on."""
        width = int(self.shape.stage_replicas[stage]) if self.shape.turns else 1
        return range((version - 1) * width, version * width)

    def version_of(self, stage: int, mini_batch: int) -> int:
        """Return the version that the gradients of a mini-batch go into."""
        return mini_batch // (int(self.shape.stage_replicas[stage]) if self.shape.turns else 1) + 1

    def delay(self, stage: int, op: Op = Op.F) -> float:
        """Return the mean number of updates by which the version that a steady forward (or backward) names is older
        than the one that its gradient updates."""
        body, per_batch = self.loop.body[self.shape.slot(stage)], self.shape.microbatches
        rows = (body.op == op) & (body.stage == stage)
        return float((body.microbatch[rows] // per_batch - body.version[rows]).mean()) if rows.any() else 0.0

    @cached_property
    def _named(self) -> list[IntArray]:
        """Versions that forwards name, by stage and micro-batch, in a run with at least two steady passes."""
        run = self.loop.unroll(self.fed(self.steady + 2))
        rows, slots = run.rows, run.slot_of_rows()
        versions = []
        for stage in range(self.shape.stages):
            forward = np.isin(rows.op, (Op.F, Op.FB)) & (rows.stage == stage)
            if not self.shape.turns:  # replicas that split micro-batches name the same
                forward &= slots == self.shape.slot(stage)
            order = np.argsort(rows.microbatch[forward], kind="stable")
            versions.append(rows.version[forward][order])
        return versions

    def _cut(self, batches: int, slot: int, first: int, last: int | None) -> list[ActionRow]:
        """Return a slot's rows in a short run from compute action `first` up to, but not including, `last`."""
        full = self.schedule(batches)
        rows = full.rows.take(slice(int(full.starts[slot]), int(full.starts[slot + 1])))
        replica = int(full.shape.slot_replica[slot])
        begins, tail = _begins(rows), _tail(rows, full.shape, replica)
        begin = tail if first >= len(begins) else int(begins[first])
        end = len(rows) if last is None else tail if last >= len(begins) else int(begins[last])
        return _listed(rows, begin, end, replica)

    def _shifted(self, rows: list[ActionRow], passes: int) -> list[ActionRow]:
        if not passes:
            return rows
        numbers = passes * self.loop.period * self.shape.microbatches
        return [_later(row, numbers, passes * self._steps[row.stage]) for row in rows]


def slot_rows(schedule: Schedule, slot: int) -> list[ActionRow]:
    """Return the whole list of one slot of a lowered schedule."""
    replica = int(schedule.shape.slot_replica[slot])
    return _listed(schedule.rows, int(schedule.starts[slot]), int(schedule.starts[slot + 1]), replica)


def _listed(rows: ScheduleRows, begin: int, end: int, replica: int) -> list[ActionRow]:
    columns = (column[begin:end].tolist() for column in rows.columns()[:6])
    listed = zip(*columns, strict=True)
    return [ActionRow(Op(op), at, k, version, peer, other, replica) for op, at, k, version, peer, other in listed]


def _later(row: ActionRow, numbers: int, versions: int) -> ActionRow:
    microbatch = row.microbatch + numbers if row.microbatch >= 0 else row.microbatch
    named = row.op <= Op.FB or row.op in (Op.REDUCE, Op.UPDATE)
    return row._replace(microbatch=microbatch, version=row.version + versions if named else row.version)


def _tail(rows: ScheduleRows, shape: Shape, replica: int) -> int:
    """Return the first of the last rows by which a replica without a mini-batch takes part in a last round: they belong
    to the drain."""
    if not shape.turns:
        return len(rows)
    updates = np.isin(rows.op, (Op.REDUCE, Op.UPDATE))
    without = updates & ((rows.version - 1) * shape.stage_replicas[rows.stage] + replica >= shape.batches)
    return int(np.argmax(without)) if without.any() else len(rows)


def _begins(rows: ScheduleRows) -> IntArray:
    """Return the first row of each compute action: the first of its receives, else its own."""
    compute = np.flatnonzero(rows.op <= Op.FB)
    receive = np.isin(rows.op, (Op.RECV_F, Op.RECV_B))
    after = np.concatenate(([0], np.cumsum(~receive)))  # other rows than receives, before each row
    others = np.flatnonzero(~receive)
    before = after[compute] - 1  # the last such row before the action
    return np.where(before >= 0, others[before] + 1, 0).astype(np.int32)
