"""DualPipeV (DeepSeek-AI 2025): a V placement whose steady state pairs a forward with a full backward.

With `overlap` the pair F&B is one atomic action, otherwise the forward runs and then the backward. Rank r of p runs

    2(p-r-1) F0 · r+1 times (F0 F1) · p-r-1 times (I1 W1 F1) · m-2p+r+1 times (F0&B1 F1&B0) · p-r-1 times (B1 F1&B0)
    · r+1 times (B1 B0), whose second half leaves its weight gradients for later · p-r-1 times (W I0) · r+1 W
"""

from __future__ import annotations

import numpy as np

from penstock.core.action import Op
from penstock.core.schedule import Schedule
from penstock.core.validation import truth
from penstock.errors import InputError
from penstock.schedules.ask import Ask
from penstock.schedules.program import Program, code, counted, flush

F0, B0, I0, W0, O0 = (code(op, 0) for op in (Op.F, Op.B, Op.I, Op.W, Op.FB))
F1, B1, I1, W1, O1 = (code(op, 1) for op in (Op.F, Op.B, Op.I, Op.W, Op.FB))


def dualpipe_v(ask: Ask) -> Schedule:
    p, m = ask.stages, ask.microbatches
    if m < 2 * p:
        raise InputError(f"dualpipe-v's microbatches to be at least twice its {p} stages", m, f"use {2 * p} or more")
    overlap = truth("overlap", ask.options.get("overlap", False))
    return flush(ask.folded(), [_rank(p, m, r, overlap) for r in range(p)])


def _rank(p: int, m: int, r: int, overlap: bool) -> Program:
    f0, f1 = (O0, O1) if overlap else (F0, F1)
    steady = np.tile([f0, B1, f1, B0], m - 2 * p + r + 1)
    ends = _ending(r)
    late = [c for c in ends if c in (I0, I1)] + [I0] * (p - r - 1)
    weights = [W1 if c == I1 else W0 for c in late]  # oldest first
    tail = [c for pair in zip(weights[: p - r - 1], [I0] * (p - r - 1), strict=True) for c in pair]
    codes = np.concatenate(
        [
            np.tile([F0], 2 * (p - r - 1)),
            np.tile([F0, F1], r + 1),
            np.tile([I1, W1, F1], p - r - 1),
            steady,
            np.tile([B1, f1, B0], p - r - 1),
            ends,
            tail,
            weights[p - r - 1 :],
        ]
    ).astype(np.int64)
    return counted(codes, (r, 2 * p - 1 - r))


def _ending(r: int) -> list[int]:
    """The r+1 times (B1 B0): from the middle on, input gradients only. On even ranks the middle falls inside a pair."""
    half = (r + 1) // 2 * 2 + (1 if r % 2 == 0 else 0)
    pairs = [B1, B0] * (r + 1)
    return [c if at < half else {B1: I1, B0: I0}[c] for at, c in enumerate(pairs)]
