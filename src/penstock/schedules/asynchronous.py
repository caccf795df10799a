"""Pipelines without a flush, as loops: `warm` forwards ahead, then one forward, one backward for ever.

Every method here runs the same body; they differ in the weight version an action names. With w the rank's warm-up, m
micro-batches a mini-batch and t the number of a micro-batch among those of its replica (k for one replica):

    newest version at the forward    floor((t - w) / m)          at the backward    floor(t / m)

A version below 0 is version 0. Rank 0 of 3, m = 1, weight stashing:

    fill 0F0 0F1   body 0F2@0 0B0@0 | 0F3@1 0B1@0 | 0F4@2 0B2@0 | 0F5@3 0B3@1 | ...
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

import numpy as np

from penstock.core.action import Op
from penstock.core.loop import Loop
from penstock.core.schedule import ScheduleRows
from penstock.core.shape import IntArray, Shape

# (rank, micro-batches, t) of forwards, or of backwards -> the versions they name
VersionRule = Callable[[int, IntArray, IntArray], IntArray]


def endless(shape: Shape, warm: list[int], forward: VersionRule, backward: VersionRule) -> Loop:
    """The loop of a straight pipeline with `warm[rank]` forwards ahead on each rank."""
    period = lcm(*shape.replicas) if shape.turns else 1
    fill, body = [], []
    for rank, replica in zip(shape.slot_rank.tolist(), shape.slot_replica.tolist(), strict=True):
        count = period * shape.microbatches // (shape.replicas[rank] if shape.turns else 1)
        ahead = np.arange(warm[rank] + count, dtype=np.int32)
        number = _global_number(shape, rank, replica, ahead)
        f_version = forward(rank, number, ahead)
        b_version = backward(rank, number[:count], ahead[:count])
        fill.append(_rows(Op.F, rank, number[: warm[rank]], f_version[: warm[rank]]))
        new = _rows(Op.F, rank, number[warm[rank] :], f_version[warm[rank] :])
        old = _rows(Op.B, rank, number[:count], b_version)
        body.append(_alternate(new, old))
    return Loop(shape, tuple(fill), tuple(body), period)


def _global_number(shape: Shape, rank: int, replica: int, t: IntArray) -> IntArray:
    """The micro-batch that is the t-th of this replica."""
    if not shape.turns:
        return t
    m = shape.microbatches
    return ((t // m * shape.replicas[rank] + replica) * m + t % m).astype(np.int32)


def _rows(op: Op, stage: int, number: IntArray, version: IntArray) -> ScheduleRows:
    return ScheduleRows.compute(np.full(len(number), op), np.full(len(number), stage), number, version)


def _alternate(a: ScheduleRows, b: ScheduleRows) -> ScheduleRows:
    new: tuple[np.ndarray, ...] = a.columns()[:4]
    old: tuple[np.ndarray, ...] = b.columns()[:4]
    op, stage, number, version = (np.stack(pair, axis=1).ravel() for pair in zip(new, old, strict=True))
    return ScheduleRows.compute(op, stage, number, version)
