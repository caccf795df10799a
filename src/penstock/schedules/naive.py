"""Naive model parallelism: one micro-batch goes through all ranks and back before the next one starts.

rank 0   F0 .  .  .  B0 F1 .  .  .  B1
rank 1   .  F0 .  B0 .  .  F1 .  B1 .
rank 2   .  .  F0B0  .  .  .  F1B1  .
"""

from __future__ import annotations

from penstock.core.action import Op
from penstock.core.schedule import Schedule
from penstock.schedules.ask import Ask
from penstock.schedules.program import flush, sweep


def naive(ask: Ask) -> Schedule:
    return flush(ask.straight(), [sweep(r, ask.microbatches, (Op.F, 0), (Op.B, 0)) for r in range(ask.stages)])
