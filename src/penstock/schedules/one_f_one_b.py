"""1F1B (PipeDream-Flush): rank r of p runs p-1-r forwards ahead, then one forward, one backward.

rank 0   F0 F1 F2 .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
rank 1   .  F0 F1 .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
rank 2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
"""

from __future__ import annotations

from penstock.core.action import Op
from penstock.core.schedule import Schedule
from penstock.schedules.ask import Ask
from penstock.schedules.program import flush, sweep


def one_f_one_b(ask: Ask) -> Schedule:
    p = ask.stages
    return flush(ask.straight(), [sweep(r, ask.microbatches, (Op.F, p - 1 - r), (Op.B, 0)) for r in range(p)])
