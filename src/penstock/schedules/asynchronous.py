"""Pipelines without a flush, as loops: PipeDream, PipeDream-2BW and PipeMare.

Every method runs `warm` forwards ahead on each rank and then, without end, one forward and one backward; they differ in
the weight version that an action names. With w the rank's warm-up, m micro-batches a mini-batch and t the number of a
micro-batch among those of its replica (k for one replica):

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
from penstock.core.shape import IntArray, Law, Shape, Sharing
from penstock.core.validation import truth
from penstock.errors import InputError
from penstock.schedules.request import ScheduleRequest

# (rank, micro-batches, t) of forwards, or of backwards -> the versions they name
VersionRule = Callable[[int, IntArray, IntArray], IntArray]


def pipedream(request: ScheduleRequest) -> Loop:
    """PipeDream (Narayanan et al. 2019): one update a mini-batch, weights stashed for the backward.

    Stage s with r_s replicas runs floor((workers - 1 - sum of earlier r) / r_s) forwards ahead: of micro-batches in a
    plain pipeline, of whole mini-batches where replicas take those in turns. `stash=True`: a forward uses the newest
    weights of its stage and its backward the same version. `vertical_sync=True`: all stages use what the first stage
    had. `stash=False`: both take what is newest, which is no gradient of any function; it is offered to show the harm.
    """
    stash = truth("stash", request.options.get("stash", True))
    vertical = truth("vertical_sync", request.options.get("vertical_sync", False))
    if vertical and not stash:
        raise InputError(
            "weight stashing where vertical_sync is on", "vertical_sync=True with stash=False", "leave stash on"
        )
    law = Law.VERTICAL if vertical else Law.STASH if stash else Law.NEWEST
    shape = request.straight(law, Sharing.TURNS)
    warm = warm_up(shape)
    m = shape.microbatches

    def newest(rank: int, number: IntArray, t: IntArray) -> IntArray:
        return (t - warm[rank]) // m

    def input_stage(rank: int, number: IntArray, t: IntArray) -> IntArray:
        """Return the version that holds the mini-batches which the first stage's version held."""
        first = shape.replicas[0]
        t_first = number // m // first * m + number % m
        return (t_first - warm[0]) // m * first // shape.replicas[rank]

    if not stash:
        return endless(shape, warm, newest, lambda rank, number, t: t // m)
    rule = input_stage if vertical else newest
    return endless(shape, warm, rule, rule)


def warm_up(shape: Shape) -> list[int]:
    """Return the forwards that each stage runs ahead of its first backward.

    A later replica's first micro-batch comes a whole mini-batch after its neighbour's, so there the lead is counted in
    mini-batches: 1-2-1 with 3 micro-batches and a lead of 3, 1, 0 micro-batches would stand still.
    """
    workers, earlier, warm = shape.slots, 0, []
    unit = 1 if workers == shape.ranks else shape.microbatches
    for replicas in shape.replicas:
        warm.append((workers - 1 - earlier) // replicas * unit)
        earlier += replicas
    return warm


def two_bw(request: ScheduleRequest) -> Loop:
    """PipeDream-2BW (Narayanan et al. 2021): gradients of m micro-batches make one version; two versions are enough.

    A micro-batch of mini-batch b uses version max(b - 1, 0), forward and backward, on every stage: a delay of one.
    """
    p, m = request.stages, request.microbatches
    if m < p:
        raise InputError(
            f"2bw's microbatches to be at least its depth of {p} stages", m, f"use {p} or more micro-batches"
        )

    def delayed(rank: int, number: IntArray, t: IntArray) -> IntArray:
        return number // m - 1

    return endless(request.straight(Law.TWO_BW), [p - 1 - r for r in range(p)], delayed, delayed)


def pipemare(request: ScheduleRequest) -> Loop:
    """PipeMare (Yang et al. 2021): one weight copy; forward and backward each use what is newest.

    The learning rate and the backward weights are corrected for the delay, which is counted off this schedule: on rank
    i of p (from 0) a forward is (p-1-i)/m updates old on average, a backward none.
    """
    p, m = request.stages, request.microbatches
    warm = [p - 1 - r for r in range(p)]
    return endless(
        request.straight(Law.NEWEST),
        warm,
        lambda rank, number, t: (t - warm[rank]) // m,
        lambda rank, number, t: t // m,
    )


def endless(shape: Shape, warm: list[int], forward: VersionRule, backward: VersionRule) -> Loop:
    """Return the loop of a straight pipeline with `warm[rank]` forwards ahead on each rank."""
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
    """Return the micro-batch that is the t-th of this replica."""
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
