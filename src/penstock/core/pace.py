"""Seconds from one mini-batch to the next, so that runs of different lengths can stand side by side.

A synchronous run repeats its step: each mini-batch has its own fill and drain. An asynchronous one fills once, then
takes in a mini-batch whenever one leaves, and drains once; what it takes in between is found where neither end is felt:

    fill     until every slot has begun
    drain    from the moment at which a slot has run its last forward
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np

from penstock.core.action import Op
from penstock.core.links import FloatArray
from penstock.core.schedule import Schedule
from penstock.core.shape import Law


@dataclass(frozen=True)
class Pace:
    """One mini-batch among many."""

    seconds: float
    bubble: float  # the share of them in which a slot is idle, on average
    fill_and_drain: float  # what the makespan has beyond them


def pace(schedule: Schedule, start: FloatArray, end: FloatArray, work: FloatArray) -> Pace | None:
    """The pace of a run; None where an asynchronous one is too short to have a steady state. `work`: by slot."""
    shape = schedule.shape
    if not len(end):
        return None
    makespan = float(end.max() - start.min())
    seconds = makespan / shape.batches if shape.law is Law.SYNC else _steady(schedule, start, end)
    if seconds is None or seconds <= 0:
        return None
    busy = float(work.mean()) / shape.batches / seconds
    return Pace(seconds, max(0.0, 1.0 - busy), max(0.0, makespan - shape.batches * seconds))


def _steady(schedule: Schedule, start: FloatArray, end: FloatArray) -> float | None:
    """Seconds between the ends of two mini-batches of the steady state, of as many as there are."""
    shape, op = schedule.shape, schedule.rows.op
    slots, compute = schedule.slot_of_rows(), op <= Op.FB
    begun, forward = np.full(shape.slots, np.inf), np.full(shape.slots, -np.inf)
    np.minimum.at(begun, slots[compute], start[compute])
    ahead = (op == Op.F) | (op == Op.FB)
    np.maximum.at(forward, slots[ahead], end[ahead])
    left = np.full(shape.batches, -np.inf)
    np.maximum.at(left, schedule.rows.microbatch[compute] // shape.microbatches, end[compute])
    within = np.flatnonzero((left >= begun.max()) & (left <= forward.min()))
    period = lcm(*shape.replicas) if shape.turns else 1  # replicas in turns repeat after so many mini-batches
    if len(within) < 2:
        return None
    last = int(within[-1])
    passed = (last - int(within[0])) // period * period
    return float(left[last] - left[last - passed]) / passed if passed else None
