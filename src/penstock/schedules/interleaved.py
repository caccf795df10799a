"""Interleaved 1F1B (Narayanan et al. 2021): v chunks a rank, chunk c of rank r being stage c·p + r.

Micro-batches go in groups of p; each group runs through chunk 0, then chunk 1, and so on; backwards take the chunks in
reverse. Rank r runs 2(p-r-1) + (v-1)p forwards ahead, then one forward, one backward. p = 2, v = 2, m = 2, rank 0:

    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
"""

from __future__ import annotations

import numpy as np

from penstock.core.action import Op
from penstock.core.schedule import Schedule
from penstock.errors import InputError
from penstock.schedules.ask import Ask
from penstock.schedules.program import Program, flush, sweep


def interleaved(ask: Ask) -> Schedule:
    if ask.microbatches % ask.stages:
        raise InputError(
            f"interleaved's microbatches to be a multiple of its {ask.stages} stages",
            ask.microbatches,
            f"use {ask.microbatches // ask.stages * ask.stages + ask.stages}",
        )
    return flush(ask.looped(), [_rank(ask, r) for r in range(ask.stages)])


def _rank(ask: Ask, r: int) -> Program:
    p, v, m = ask.stages, ask.chunks, ask.microbatches
    order = sweep(r, m * v, (Op.F, 2 * (p - r - 1) + (v - 1) * p), (Op.B, 0))
    k = order.microbatch  # the k-th forward, or backward, of this rank
    chunk = k % (p * v) // p
    chunk = np.where(order.op == Op.B, v - 1 - chunk, chunk)
    return Program(order.op, (chunk * p + r).astype(np.int32), (k // (p * v) * p + k % p).astype(np.int32))
