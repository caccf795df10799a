"""GPipe (Huang et al. 2019): all forwards, then all backwards in reverse order.

rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B3 B3 B2 B2 ...
rank 1   .  F0 F1 F2 F3 .  .  .  B3 B3 B2 B2 ...
"""

from __future__ import annotations

from penstock.core.action import Op
from penstock.core.schedule import Schedule
from penstock.schedules.ask import Ask
from penstock.schedules.program import chain, each, flush


def gpipe(ask: Ask) -> Schedule:
    m = ask.microbatches
    ranks = [chain(each(Op.F, r, range(m)), each(Op.B, r, range(m)[::-1])) for r in range(ask.stages)]
    return flush(ask.straight(), ranks)
