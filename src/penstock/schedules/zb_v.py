"""ZB-V (Qi et al. 2024): two chunks a rank placed as a V; no bubble when F, I and W take equal times.

Chunk 0 runs down the ranks, chunk 1 up again, so the last stage sits on rank 0 and its first backward starts early.
For m < 2p-1 the schedule of 2p-1 micro-batches is built and the surplus dropped. Rank 1 of 2, m = 3:

    1F0 | 2F0 1F1 | 2F1 2I0 2W0 | 1F2 1I0 1W0 2F2 2I1 2W1 | 1I1 2I2 | 1I2 1W1 | 2W2 1W2
"""

from __future__ import annotations

import numpy as np

from penstock.core.action import Op
from penstock.core.schedule import Schedule
from penstock.schedules.ask import Ask
from penstock.schedules.program import Program, code, counted, flush

F0, I0, W0 = (code(op, 0) for op in (Op.F, Op.I, Op.W))
F1, I1, W1 = (code(op, 1) for op in (Op.F, Op.I, Op.W))


def zb_v(ask: Ask) -> Schedule:
    return flush(ask.folded(), [_rank(ask.stages, ask.microbatches, r) for r in range(ask.stages)])


def _rank(p: int, wanted: int, r: int) -> Program:
    m = max(wanted, 2 * p - 1)
    with_f0 = m - 2 * p + r + 1  # steady rounds that still have a forward of chunk 0 to run
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
    return program.keep(program.microbatch < wanted)
