"""DAPPLE's early backward (Fan et al. 2021): rank i runs K_i forwards first, then strictly one backward, one forward.

K_i bounds the live activations. Policy `pa`: K_i = min(S-i, D). Policy `pb`: K_i = min(2(S-i)-1, D), for pipelines
whose transfers take about as long as their compute. D (`cap`) is what memory allows.

    pb, rank 0 of 2   F0 F1 F2 B0 F3 B1 ...      pa, rank 0 of 2   F0 F1 B0 F2 B1 ...
    pb, rank 1 of 2   F0 B0 F1 B1 ...            pa, rank 1 of 2   F0 B0 F1 B1 ...
"""

from __future__ import annotations

from penstock.core.action import Op
from penstock.core.schedule import Schedule
from penstock.core.validation import whole
from penstock.errors import InputError
from penstock.schedules.ask import Ask
from penstock.schedules.program import flush, sweep

POLICIES = ("pa", "pb")


def dapple(ask: Ask) -> Schedule:
    policy, cap = ask.options.get("policy", "pa"), ask.options.get("cap")
    if policy not in POLICIES:
        raise InputError("dapple's policy to be 'pa' or 'pb'", repr(policy), "choose one of the two")
    if cap is not None:
        whole("dapple's cap", cap)
    ranks = []
    for i in range(ask.stages):
        first = ask.stages - i if policy == "pa" else 2 * (ask.stages - i) - 1
        k = first if cap is None else min(first, cap)
        ranks.append(sweep(i, ask.microbatches, (Op.F, k - 1), (Op.B, 0)))
    return flush(ask.straight(), ranks)
