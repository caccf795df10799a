"""Seconds per mini-batch, so that runs of different lengths can be compared.

In a synchronous run, each mini-batch has its own fill and drain. An asynchronous run fills once and drains once; its
seconds per mini-batch are measured between fill and drain, where

    fill     lasts until every slot has begun
    drain    begins when a slot has run its last forward
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
    """Time and bubble of one mini-batch in the steady state, and the time of fill and drain."""

    seconds: float
    bubble: float  # share of the seconds in which a slot is idle, mean over the slots
    fill_and_drain: float  # makespan minus the seconds of all mini-batches


def pace(schedule: Schedule, start: FloatArray, end: FloatArray, work: FloatArray) -> Pace | None:
    """Return the pace of a run, None if an asynchronous run is too short for a steady state. `work` is by slot."""
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
    """Return the seconds per mini-batch of the steady state, as a mean over all mini-batches in it."""
    shape, op = schedule.shape, schedule.rows.op
    slots, compute = schedule.slot_of_rows(), op <= Op.FB
    begun, forward = np.full(shape.slots, np.inf), np.full(shape.slots, -np.inf)
    np.minimum.at(begun, slots[compute], start[compute])
    ahead = (op == Op.F) | (op == Op.FB)
    np.maximum.at(forward, slots[ahead], end[ahead])
    left = np.full(shape.batches, -np.inf)
    np.maximum.at(left, schedule.rows.microbatch[compute] // shape.microbatches, end[compute])
    within = np.flatnonzero((left >= begun.max()) & (left <= forward.min()))
    period = lcm(*shape.replicas) if shape.turns else 1  # replicas that take turns repeat after so many mini-batches
    if len(within) < 2:
        return None
    last = int(within[-1])
    passed = (last - int(within[0])) // period * period
    return float(left[last] - left[last - passed]) / passed if passed else None
