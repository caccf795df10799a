"""A run of unknown length: a fill, a body that repeats, and a drain.

Micro-batch and version numbers of the body are those of iteration 0 and grow by a fixed step each time. A version below
0 means version 0: the pipe starts with what is there. Leaving after n mini-batches drops every action of a later one,
so what is left of the last iterations is the drain, and it is the same for every rank that knows n.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.core.action import Op
from penstock.core.arguments import named_fields
from penstock.core.given import whole
from penstock.core.room import require_room
from penstock.core.schedule import Rows, Schedule
from penstock.core.shape import MOST, Law, Shape


@named_fields
@dataclass(frozen=True, eq=False)
class Loop:
    """`fill[s]` and `body[s]` are the rows of slot s; one pass of the body takes in `period` mini-batches."""

    shape: Shape  # of one mini-batch: `unroll` fills in how many
    fill: tuple[Rows, ...]
    body: tuple[Rows, ...]
    period: int

    @classmethod
    def repeating(cls, schedule: Schedule) -> Loop:
        """A list of some mini-batches, again and again: the pipe drains at its end, and fills anew.

        Versions are counted on from the drained ones. Under 2bw a list's first mini-batch names version 0 because there
        is none before it; later it has to be the one before the newest.
        """
        shape, rows = schedule.shape, schedule.rows
        compute = rows.op <= Op.FB
        op = np.where(rows.op == Op.FB, np.uint8(Op.F), rows.op)  # what overlaps follows each other
        delayed = shape.law is Law.TWO_BW
        version = rows.microbatch // shape.microbatches - 1 if delayed else rows.version
        slots = schedule.slot_of_rows()
        body = []
        for slot in range(shape.slots):
            mine = compute & (slots == slot)
            body.append(Rows.compute(op[mine], rows.stage[mine], rows.microbatch[mine], version[mine]))
        nothing = Rows.compute([], [], [], [])
        return cls(replace(shape, batches=1), (nothing,) * shape.slots, tuple(body), shape.batches)

    def version_step(self) -> np.ndarray:
        """Updates a stage makes in one pass of the body."""
        shape = self.shape
        return self.period // (shape.stage_replicas if shape.turns else np.ones_like(shape.stage_replicas))

    def unroll(self, batches: int) -> Schedule:
        """The plain list for a run of so many mini-batches."""
        whole("batches", batches, most=MOST // self.shape.microbatches // self.shape.stages)
        require_room(2 * self.shape.stages * self.shape.microbatches * batches)
        shape = replace(self.shape, batches=batches)
        passes = -(-batches // self.period)
        slots = [self._run(slot, passes, shape.total) for slot in range(shape.slots)]
        starts = np.concatenate(([0], np.cumsum([len(rows) for rows in slots]))).astype(np.int64)
        columns = (np.concatenate(parts) for parts in zip(*(rows.columns()[:4] for rows in slots), strict=True))
        return Schedule(shape, Rows.compute(*columns), starts)

    def drain(self, batches: int) -> tuple[Rows, ...]:
        """What each slot does after its last full pass of the body, when the run ends after so many mini-batches."""
        whole, passes = self.unroll(batches), self._full_passes(batches)
        done = [  # a short run cuts the fill as well
            int(np.count_nonzero(fill.microbatch < whole.shape.total)) + len(body) * passes
            for fill, body in zip(self.fill, self.body, strict=True)
        ]
        return tuple(
            whole.rows.take(slice(int(whole.starts[slot]) + done[slot], int(whole.starts[slot + 1])))
            for slot in range(whole.shape.slots)
        )

    def _full_passes(self, batches: int) -> int:
        """Passes of the body in which no slot has to drop an action."""
        ahead = max((int(rows.microbatch.max(initial=-1)) for rows in self.body), default=-1) + 1
        step = self.period * self.shape.microbatches
        return max(0, (batches * self.shape.microbatches - ahead) // step + 1)

    def _run(self, slot: int, passes: int, total: int) -> Rows:
        fill, body = self.fill[slot], self.body[slot]
        turn = np.repeat(np.arange(passes, dtype=np.int32), len(body))
        stage = np.tile(body.stage, passes)
        microbatch = np.tile(body.microbatch, passes) + turn * np.int32(self.period * self.shape.microbatches)
        version = np.tile(body.version, passes) + turn * self.version_step()[stage].astype(np.int32)
        op = np.concatenate((fill.op, np.tile(body.op, passes)))
        stage, microbatch, version = (
            np.concatenate(pair)
            for pair in ((fill.stage, stage), (fill.microbatch, microbatch), (fill.version, version))
        )
        keep = microbatch < total
        return Rows.compute(op[keep], stage[keep], microbatch[keep], np.maximum(version, 0)[keep])
