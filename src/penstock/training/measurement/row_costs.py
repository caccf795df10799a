"""Costs of stages and transfers, from rows that were timed.

All of a rank's own time is counted: a compute row includes the sends that follow it and the handling of the receives
before it, because they occupy the rank too. Where a receive had to wait, the time from the end of the send to its own
end, less the handling, is the latency of the link.

A replica's rows take its share of a micro-batch's seconds, so a stage's are as many times longer. A reduction is
counted from when the last replica has come to it.

All costs are means, not medians: rows differ (the first backward allocates the gradients), delays scatter to one side,
and the seconds of a step are the sum of its rows, the slow ones included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.core.action import Op
from penstock.core.cost import Costs, Footprint, shares
from penstock.core.links import FloatArray, Links, pair_links
from penstock.core.match import Match, match
from penstock.core.schedule import BoolArray, Schedule


@dataclass(frozen=True, eq=False)
class Timed:
    """Start and end seconds of every row of some steps: (steps, rows). `recompute`: which stages run forwards again."""

    schedule: Schedule
    start: FloatArray
    end: FloatArray
    recompute: BoolArray

    def costs(self, footprint: Footprint) -> Costs:
        shape = self.schedule.shape
        every = 1.0 / shares(shape)
        forward, whole, split, late = (
            every * self._by_stage(*ops) for ops in ((Op.F, Op.FB), (Op.B,), (Op.I,), (Op.W,))
        )
        apart = np.bincount(self.schedule.rows.stage[self.schedule.rows.op == Op.I], minlength=shape.stages) > 0
        again = np.where(self.recompute, forward, 0.0)  # costs count it on top of a backward, the clock within it
        return Costs(
            forward=forward,
            input_grad=np.maximum(np.where(apart, split, whole) - again, 0.0),
            weight_grad=late,
            update=self._by_stage(Op.UPDATE),
            reduce=self._by_stage(Op.REDUCE),
            recompute=self.recompute,
            slowdown=np.ones(shape.slots),
            links=self._links,
            footprint=footprint,
        )

    def _by_stage(self, *ops: Op) -> FloatArray:
        """Return the mean seconds of some operations' rows, by stage."""
        chosen = np.isin(self.schedule.rows.op, [int(op) for op in ops])
        stage, stages = self.schedule.rows.stage[chosen], self.schedule.shape.stages
        total = np.bincount(stage, self._held[chosen], stages)
        mean: FloatArray = total / np.maximum(np.bincount(stage, minlength=stages), 1)
        return mean

    @cached_property
    def _held(self) -> FloatArray:
        """Seconds for which each compute row occupies its rank, with the transfers around it."""
        seconds = (self.end - self.start).mean(axis=0)
        held = np.where(np.isin(self.schedule.rows.op, (Op.RECV_F, Op.RECV_B)), self._handling, seconds)
        op, first = self.schedule.rows.op.tolist(), set(self.schedule.starts.tolist())
        last, before = -1, 0.0
        for row, kind in enumerate(op):
            if row in first:
                last, before = -1, 0.0
            if kind in (Op.RECV_F, Op.RECV_B):
                before += held[row]
            elif kind in (Op.SEND_F, Op.SEND_B):
                held[last] += held[row] if last >= 0 else 0.0
            elif kind <= Op.FB:
                held[row] += before
                last, before = row, 0.0
        return held

    @cached_property
    def _pairs(self) -> Match:
        return match(self.schedule)

    @cached_property
    def _transfers(self) -> tuple[FloatArray, FloatArray]:
        """Seconds of handling and of latency, by way and lane."""
        lanes = self._pairs.sends.shape[:2]
        handling, latency = np.zeros(lanes), np.zeros(lanes)
        for place in np.ndindex(lanes):
            sends, receives = self._pairs.sends[place], self._pairs.receives[place]
            used = sends >= 0
            if used.any():
                sent, begun = self.end[:, sends[used]].ravel(), self.start[:, receives[used]].ravel()
                handling[place], latency[place] = _transfer(sent, begun, self.end[:, receives[used]].ravel())
        return handling, latency

    @property
    def _handling(self) -> FloatArray:
        """Seconds by row that a receive takes when its message has already arrived; 0 for other rows."""
        by_row, handling = np.zeros(len(self.schedule)), self._transfers[0]
        for (way, lane), seconds in np.ndenumerate(handling):
            receives = self._pairs.receives[way, lane]
            by_row[receives[receives >= 0]] = seconds
        return by_row

    @property
    def _links(self) -> Links:
        links = pair_links(self.schedule.shape, np.zeros(len(self.schedule.shape.edges)))
        return replace(links, latency=self._transfers[1])


def _transfer(sent: FloatArray, begun: FloatArray, taken: FloatArray) -> tuple[float, float]:
    """Return handling and latency of a lane, from the ends of its sends and the starts and ends of its receives."""
    waited = begun < sent
    whole = float((taken - sent)[waited].mean()) if waited.any() else 0.0
    there = begun >= sent + max(whole, 0.0)  # sent so long ago that it has arrived
    handling = float((taken - begun)[there].mean()) if there.any() else 0.0
    return handling, max(whole - handling, 0.0)
