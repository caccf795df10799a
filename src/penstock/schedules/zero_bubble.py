"""ZB-H1 and ZB-H2 (Qi et al. 2023): the weight gradient W runs late and fills what would be idle.

After its warm-up, a rank runs F, I and, once more than `held` weight gradients wait, a W. H1 warms up like 1F1B and
holds r of them; H2 doubles both, for twice the memory. H1 on rank 1 of 3, m = 4:

    F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
"""

from __future__ import annotations

from penstock.core.action import Op
from penstock.core.schedule import Schedule
from penstock.schedules.ask import Ask
from penstock.schedules.program import flush, sweep


def zb_h1(ask: Ask) -> Schedule:
    return _handcrafted(ask, 1)


def zb_h2(ask: Ask) -> Schedule:
    return _handcrafted(ask, 2)


def _handcrafted(ask: Ask, depth: int) -> Schedule:
    p, m = ask.stages, ask.microbatches
    ranks = [sweep(r, m, (Op.F, depth * (p - 1 - r)), (Op.I, 0), (Op.W, -depth * r)) for r in range(p)]
    return flush(ask.straight(), ranks)
