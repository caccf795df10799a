"""Synchronous methods with several chunks a rank: interleaved 1F1B, ZB-V and DualPipeV."""

from __future__ import annotations

import numpy as np

from penstock.core.action import Op
from penstock.core.schedule import Schedule
from penstock.core.validation import truth
from penstock.errors import InputError
from penstock.schedules.program import Program, code, counted, flush, sweep
from penstock.schedules.request import ScheduleRequest

F0, B0, I0, W0, O0 = (code(op, 0) for op in (Op.F, Op.B, Op.I, Op.W, Op.FB))
F1, B1, I1, W1, O1 = (code(op, 1) for op in (Op.F, Op.B, Op.I, Op.W, Op.FB))


def interleaved(request: ScheduleRequest) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021): v chunks a rank, chunk c of rank r being stage c·p + r.

    Micro-batches go in groups of p; each group runs through chunk 0, then chunk 1, and so on; backwards take the chunks
    in reverse. Rank r runs 2(p-r-1) + (v-1)p forwards ahead, then one forward, one backward. p = 2, v = 2, m = 2,
    rank 0:

        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    """
    p, m = request.stages, request.microbatches
    if m % p:
        raise InputError(f"interleaved's microbatches to be a multiple of its {p} stages", m, f"use {m // p * p + p}")
    return flush(request.looped(), [_interleaved_rank(p, request.chunks, m, r) for r in range(p)])


def _interleaved_rank(p: int, v: int, m: int, r: int) -> Program:
    order = sweep(r, m * v, (Op.F, 2 * (p - r - 1) + (v - 1) * p), (Op.B, 0))
    k = order.microbatch  # the k-th forward, or backward, of this rank
    chunk = k % (p * v) // p
    chunk = np.where(order.op == Op.B, v - 1 - chunk, chunk)
    return Program(order.op, (chunk * p + r).astype(np.int32), (k // (p * v) * p + k % p).astype(np.int32))


def zb_v(request: ScheduleRequest) -> Schedule:
    """ZB-V (Qi et al. 2024): two chunks a rank placed as a V; no bubble when F, I and W take equal times.

    Chunk 0 runs down the ranks, chunk 1 up again, so the last stage sits on rank 0 and its first backward starts early.
    For m < 2p-1 the schedule of 2p-1 micro-batches is built and the surplus dropped. Rank 1 of 2, m = 3:

        1F0 | 2F0 1F1 | 2F1 2I0 2W0 | 1F2 1I0 1W0 2F2 2I1 2W1 | 1I1 2I2 | 1I2 1W1 | 2W2 1W2
    """
    p = request.stages
    return flush(request.folded(), [_zb_v_rank(p, request.microbatches, r) for r in range(p)])


def _zb_v_rank(p: int, microbatches: int, r: int) -> Program:
    m = max(microbatches, 2 * p - 1)
    with_f0 = m - 2 * p + r + 1  # steady repetitions that still have a forward of chunk 0 to run
    codes = np.concatenate(
        [
            np.tile([F0], 2 * (p - r) - 1),
            np.tile([F1, F0], r),
            np.tile([F1, I1, W1], p - r),
            np.tile([F0, I0, W0, F1, I1, W1], with_f0),
            np.tile([I0, W0, F1, I1, W1], m - p - with_f0),
            np.tile([I0, I1], r),
            np.tile([I0, W0], p - r),
            np.tile([W1, W0], r),
        ]
    ).astype(np.int64)
    program = counted(codes, (r, 2 * p - 1 - r))
    return program.keep(program.microbatch < microbatches)


def dualpipe_v(request: ScheduleRequest) -> Schedule:
    """DualPipeV (DeepSeek-AI 2025): a V placement whose steady state pairs a forward with a full backward.

    With `overlap` the pair F&B is one atomic action, otherwise the forward runs and then the backward. Rank r of p runs

        2(p-r-1) F0 · r+1 times (F0 F1) · p-r-1 times (I1 W1 F1) · m-2p+r+1 times (F0&B1 F1&B0)
        · p-r-1 times (B1 F1&B0) · r+1 times (B1 B0), whose second half leaves its weight gradients for later
        · p-r-1 times (W I0) · r+1 W
    """
    p, m = request.stages, request.microbatches
    if m < 2 * p:
        raise InputError(f"dualpipe-v's microbatches to be at least twice its {p} stages", m, f"use {2 * p} or more")
    overlap = truth("overlap", request.options.get("overlap", False))
    return flush(request.folded(), [_dualpipe_v_rank(p, m, r, overlap) for r in range(p)])


def _dualpipe_v_rank(p: int, m: int, r: int, overlap: bool) -> Program:
    f0, f1 = (O0, O1) if overlap else (F0, F1)
    ends = _ending(r)
    late = [c for c in ends if c in (I0, I1)] + [I0] * (p - r - 1)
    weights = [W1 if c == I1 else W0 for c in late]  # oldest first
    tail = [c for pair in zip(weights[: p - r - 1], [I0] * (p - r - 1), strict=True) for c in pair]
    codes = np.concatenate(
        [
            np.tile([F0], 2 * (p - r - 1)),
            np.tile([F0, F1], r + 1),
            np.tile([I1, W1, F1], p - r - 1),
            np.tile([f0, B1, f1, B0], m - 2 * p + r + 1),
            np.tile([B1, f1, B0], p - r - 1),
            ends,
            tail,
            weights[p - r - 1 :],
        ]
    ).astype(np.int64)
    return counted(codes, (r, 2 * p - 1 - r))


def _ending(r: int) -> list[int]:
    """Return the r+1 times (B1 B0): from the middle on, input gradients only, and on even ranks from inside a pair."""
    half = (r + 1) // 2 * 2 + (1 if r % 2 == 0 else 0)
    pairs = [B1, B0] * (r + 1)
    return [c if at < half else {B1: I1, B0: I0}[c] for at, c in enumerate(pairs)]
