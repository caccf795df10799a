"""A run of unknown length: a fill, a body that repeats, and a drain.

Micro-batch and version numbers of the body are those of iteration 0 and grow by a fixed step in each iteration. A
version below 0 means version 0, the initial weights. A run that ends after n mini-batches drops every action of a later
mini-batch; the remaining actions of the last iterations are the drain, which is the same on every rank that knows n.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.core.action import Op
from penstock.core.arguments import named_fields
from penstock.core.memory_limit import require_memory
from penstock.core.schedule import Schedule, ScheduleRows
from penstock.core.shape import MOST, Law, Shape
from penstock.core.validation import whole


@named_fields
@dataclass(frozen=True, eq=False)
class Loop:
    """Rows of a fill and a repeated body, by slot; one pass of the body begins `period` mini-batches."""

    shape: Shape  # of one mini-batch; `unroll` sets their number
    fill: tuple[ScheduleRows, ...]
    body: tuple[ScheduleRows, ...]
    period: int

    @classmethod
    def repeating(cls, schedule: Schedule) -> Loop:
        """Return a loop that repeats a schedule of some mini-batches; the pipeline drains and fills at each repetition.

        Versions continue from those of the repetition before. Under the law 2bw, the first mini-batch of a schedule
        names version 0 because there is no older one; in a loop it names the second newest.
        """
        shape, rows = schedule.shape, schedule.rows
        compute = rows.op <= Op.FB
        op = np.where(rows.op == Op.FB, np.uint8(Op.F), rows.op)  # overlapped actions run one after the other
        delayed = shape.law is Law.TWO_BW
        version = rows.microbatch // shape.microbatches - 1 if delayed else rows.version
        slots = schedule.slot_of_rows()
        body = []
        for slot in range(shape.slots):
            own = compute & (slots == slot)
            body.append(ScheduleRows.compute(op[own], rows.stage[own], rows.microbatch[own], version[own]))
        empty = ScheduleRows.compute([], [], [], [])
        return cls(replace(shape, batches=1), (empty,) * shape.slots, tuple(body), shape.batches)

    def version_step(self) -> np.ndarray:
        """Return the number of updates in one pass of the body, by stage."""
        shape = self.shape
        return self.period // (shape.stage_replicas if shape.turns else np.ones_like(shape.stage_replicas))

    def unroll(self, batches: int) -> Schedule:
        """Return the schedule of a run of `batches` mini-batches."""
        whole("batches", batches, most=MOST // self.shape.microbatches // self.shape.stages)
        require_memory(2 * self.shape.stages * self.shape.microbatches * batches)
        shape = replace(self.shape, batches=batches)
        passes = -(-batches // self.period)
        slots = [self._run(slot, passes, shape.total) for slot in range(shape.slots)]
        starts = np.concatenate(([0], np.cumsum([len(rows) for rows in slots]))).astype(np.int64)
        columns = (np.concatenate(parts) for parts in zip(*(rows.columns()[:4] for rows in slots), strict=True))
        return Schedule(shape, ScheduleRows.compute(*columns), starts)

    def drain(self, batches: int) -> tuple[ScheduleRows, ...]:
        """Return each slot's rows after its last full pass of the body, for a run of `batches` mini-batches."""
        full, passes = self.unroll(batches), self._full_passes(batches)
        done = [  # a short run drops actions of the fill too
            int(np.count_nonzero(fill.microbatch < full.shape.total)) + len(body) * passes
            for fill, body in zip(self.fill, self.body, strict=True)
        ]
        return tuple(
            full.rows.take(slice(int(full.starts[slot]) + done[slot], int(full.starts[slot + 1])))
            for slot in range(full.shape.slots)
        )

    def _full_passes(self, batches: int) -> int:
        """Return the number of passes of the body in which no slot drops an action."""
        ahead = max((int(rows.microbatch.max(initial=-1)) for rows in self.body), default=-1) + 1
        step = self.period * self.shape.microbatches
        return max(0, (batches * self.shape.microbatches - ahead) // step + 1)

    def _run(self, slot: int, passes: int, total: int) -> ScheduleRows:
        fill, body = self.fill[slot], self.body[slot]
        iteration = np.repeat(np.arange(passes, dtype=np.int32), len(body))
        stage = np.tile(body.stage, passes)
        microbatch = np.tile(body.microbatch, passes) + iteration * np.int32(self.period * self.shape.microbatches)
        version = np.tile(body.version, passes) + iteration * self.version_step()[stage].astype(np.int32)
        op = np.concatenate((fill.op, np.tile(body.op, passes)))
        stage, microbatch, version = (
            np.concatenate(pair)
            for pair in ((fill.stage, stage), (fill.microbatch, microbatch), (fill.version, version))
        )
        keep = microbatch < total
        return ScheduleRows.compute(op[keep], stage[keep], microbatch[keep], np.maximum(version, 0)[keep])
