"""What stages and transfers cost, from rows that were timed.

A rank's own time is all accounted for: to a compute row are added the sends that follow it and the handling of the
receives before it, because they hold the rank up too. Of a receive that had to wait, what lies between the end of the
send and its own end, less the handling, is the latency of the link.

All are means, not medians: rows differ (the first backward makes the gradients' memory), delays scatter to one side,
and the seconds of a step are the sum of its rows, the slow ones included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.core.action import Op
from penstock.core.cost import Costs, Footprint
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
        forward, whole, split = self._by_stage(Op.F, Op.FB), self._by_stage(Op.B), self._by_stage(Op.I)
        apart = np.bincount(self.schedule.rows.stage[self.schedule.rows.op == Op.I], minlength=shape.stages) > 0
        again = np.where(self.recompute, forward, 0.0)  # costs count it on top of a backward, the clock within it
        return Costs(
            forward=forward,
            input_grad=np.maximum(np.where(apart, split, whole) - again, 0.0),
            weight_grad=self._by_stage(Op.W),
            update=self._by_stage(Op.UPDATE),
            reduce=np.zeros(shape.stages),
            recompute=self.recompute,
            slowdown=np.ones(shape.slots),
            links=self._links,
            footprint=footprint,
        )

    def _by_stage(self, *ops: Op) -> FloatArray:
        """Mean seconds of some operations' rows."""
        wanted = np.isin(self.schedule.rows.op, [int(op) for op in ops])
        stage, stages = self.schedule.rows.stage[wanted], self.schedule.shape.stages
        total = np.bincount(stage, self._held[wanted], stages)
        mean: FloatArray = total / np.maximum(np.bincount(stage, minlength=stages), 1)
        return mean

    @cached_property
    def _held(self) -> FloatArray:
        """Seconds for which each compute row holds its rank up, with the transfers around it."""
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
            known = sends >= 0
            if known.any():
                sent, begun = self.end[:, sends[known]].ravel(), self.start[:, receives[known]].ravel()
                handling[place], latency[place] = _transfer(sent, begun, self.end[:, receives[known]].ravel())
        return handling, latency

    @property
    def _handling(self) -> FloatArray:
        """By row: of a receive, the seconds that it takes when the message is there."""
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
    """Handling and latency of a lane, from the ends of its sends, and the starts and ends of its receives."""
    waited = begun < sent
    whole = float((taken - sent)[waited].mean()) if waited.any() else 0.0
    there = begun >= sent + max(whole, 0.0)  # so long ago that it has surely arrived
    handling = float((taken - begun)[there].mean()) if there.any() else 0.0
    return handling, max(whole - handling, 0.0)
