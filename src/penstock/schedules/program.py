"""Compute programs of one rank in one mini-batch, as three arrays, and the ways to make and join them.

Most pipelines are *sweeps*: step i of a rank does one action of each kind, each for a micro-batch a fixed distance
away from i, and steps outside the mini-batch fall away at both ends. 1F1B on rank r of p sweeps (F, p-1-r), (B, 0):

    i        -2  -1   0   1   2   3        rank 1 of 4, m = 4: two forwards ahead
    F i+2     0   1   2   3   .   .
    B i       .   .   0   1   2   3        read down, then right:  F0 F1 F2 B0 F3 B1 B2 B3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.action import Op
from penstock.core.schedule import OpArray, Schedule, ScheduleRows
from penstock.core.shape import IntArray, Shape


class Program(NamedTuple):
    """Compute actions of one rank in order."""

    op: OpArray
    stage: IntArray
    microbatch: IntArray

    def keep(self, mask: np.ndarray) -> Program:
        return Program(self.op[mask], self.stage[mask], self.microbatch[mask])


def each(op: Op, stage: int, microbatches: Sequence[int] | range | IntArray) -> Program:
    """Return one operation on one stage for the micro-batches given, in their order."""
    numbers = np.asarray(microbatches, dtype=np.int32)
    return Program(np.full(len(numbers), op, np.uint8), np.full(len(numbers), stage, np.int32), numbers)


def chain(*programs: Program) -> Program:
    """Join programs, one after the other."""
    return Program(*(np.concatenate(parts) for parts in zip(*programs, strict=True)))


def sweep(stage: int, microbatches: int, *ahead: tuple[Op, int]) -> Program:
    """Return the sweep drawn above: each `(op, d)` handles micro-batch i + d in step i."""
    distance = np.array([d for _, d in ahead], dtype=np.int32)
    if distance.max() - distance.min() > microbatches:  # a deep pipeline: most of the steps drawn above are empty
        return _sparse_sweep(stage, microbatches, ahead)
    steps = np.arange(-distance.max(), microbatches - distance.min(), dtype=np.int32)
    numbers = (steps[:, None] + distance[None, :]).ravel()
    ops = np.tile(np.array([op for op, _ in ahead], dtype=np.uint8), len(steps))
    keep = (numbers >= 0) & (numbers < microbatches)
    return Program(ops[keep], np.full(int(keep.sum()), stage, dtype=np.int32), numbers[keep])


def _sparse_sweep(stage: int, microbatches: int, ahead: Sequence[tuple[Op, int]]) -> Program:
    """Return the same sweep without making its empty steps: actions by step, within a step in the order given."""
    numbers = np.tile(np.arange(microbatches, dtype=np.int32), len(ahead))
    kind = np.repeat(np.arange(len(ahead)), microbatches)
    steps = numbers - np.array([d for _, d in ahead], dtype=np.int32)[kind]
    order = np.lexsort((kind, steps))
    ops = np.array([op for op, _ in ahead], dtype=np.uint8)[kind]
    return Program(ops[order], np.full(len(order), stage, dtype=np.int32), numbers[order])


def counted(codes: np.ndarray, stages: Sequence[int]) -> Program:
    """Number actions as they come: the n-th forward of a stage is that of micro-batch n, and so is its n-th backward.

    A code is op + 16 * chunk (see `code`); `stages[chunk]` is its stage. Weight gradients follow in the order of the
    input gradients they complete.
    """
    op, chunk = (codes % 16).astype(np.uint8), codes // 16
    number = np.zeros(len(codes), dtype=np.int32)
    for at in range(len(stages)):
        here = chunk == at
        for kinds in ((Op.F, Op.FB), (Op.B, Op.I)):
            mask = here & np.isin(op, kinds)
            number[mask] = np.arange(int(mask.sum()), dtype=np.int32)
        number[here & (op == Op.W)] = number[here & (op == Op.I)]
    return Program(op, np.asarray(stages, dtype=np.int32)[chunk], number)


def code(op: Op, chunk: int) -> int:
    return int(op) + 16 * chunk


def flush(shape: Shape, ranks: Sequence[Program]) -> Schedule:
    """Return a synchronous schedule: each rank's program, repeated for all mini-batches, the same on each replica."""
    parts = [_repeated(program, shape) for rank, program in enumerate(ranks) for _ in range(shape.replicas[rank])]
    starts = np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int64)
    columns = (np.concatenate(column) for column in zip(*(part.columns()[:4] for part in parts), strict=True))
    return Schedule(shape, ScheduleRows.compute(*columns), starts)


def _repeated(program: Program, shape: Shape) -> ScheduleRows:
    if shape.batches == 1:
        return ScheduleRows.compute(*program, np.zeros(len(program.op), dtype=np.int32))
    batch = np.repeat(np.arange(shape.batches, dtype=np.int32), len(program.op))
    number = np.tile(program.microbatch, shape.batches) + batch * np.int32(shape.microbatches)
    return ScheduleRows.compute(
        np.tile(program.op, shape.batches), np.tile(program.stage, shape.batches), number, batch
    )
