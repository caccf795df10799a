"""Synchronous methods with one stage a rank: naive, GPipe, 1F1B, DAPPLE and zero bubble.

Each is drawn above the lines that make it: a column is one unit of time, a full backward takes two.
"""

from __future__ import annotations

from penstock.core.action import Op
from penstock.core.schedule import Schedule
from penstock.core.validation import whole
from penstock.errors import InputError
from penstock.schedules.program import chain, each, flush, sweep
from penstock.schedules.request import ScheduleRequest

POLICIES = ("pa", "pb")


def naive(request: ScheduleRequest) -> Schedule:
    """Naive model parallelism: one micro-batch goes through all ranks and back before the next one starts.

    rank 0   F0 .  .  .  B0 F1 .  .  .  B1
    rank 1   .  F0 .  B0 .  .  F1 .  B1 .
    rank 2   .  .  F0B0  .  .  .  F1B1  .
    """
    return flush(
        request.straight(), [sweep(r, request.microbatches, (Op.F, 0), (Op.B, 0)) for r in range(request.stages)]
    )


def gpipe(request: ScheduleRequest) -> Schedule:
    """GPipe (Huang et al. 2019): all forwards, then all backwards in reverse order.

    rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B3 B3 B2 B2 ...
    rank 1   .  F0 F1 F2 F3 .  .  .  B3 B3 B2 B2 ...
    """
    m = request.microbatches
    ranks = [chain(each(Op.F, r, range(m)), each(Op.B, r, range(m)[::-1])) for r in range(request.stages)]
    return flush(request.straight(), ranks)


def one_f_one_b(request: ScheduleRequest) -> Schedule:
    """1F1B (PipeDream-Flush): rank r of p runs p-1-r forwards ahead, then one forward, one backward.

    rank 0   F0 F1 F2 .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 1   .  F0 F1 .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
    rank 2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
    """
    p, m = request.stages, request.microbatches
    return flush(request.straight(), [sweep(r, m, (Op.F, p - 1 - r), (Op.B, 0)) for r in range(p)])


def dapple(request: ScheduleRequest) -> Schedule:
    """DAPPLE's early backward (Fan et al. 2021): rank i runs K_i forwards first, then one backward, one forward.

    K_i bounds the live activations. Policy `pa`: K_i = min(S-i, D). Policy `pb`: K_i = min(2(S-i)-1, D), for pipelines
    whose transfers take about as long as their compute. D (`cap`) is what memory allows.

        pb, rank 0 of 2   F0 F1 F2 B0 F3 B1 ...      pa, rank 0 of 2   F0 F1 B0 F2 B1 ...
        pb, rank 1 of 2   F0 B0 F1 B1 ...            pa, rank 1 of 2   F0 B0 F1 B1 ...
    """
    policy, cap = request.options.get("policy", "pa"), request.options.get("cap")
    if policy not in POLICIES:
        raise InputError("dapple's policy to be 'pa' or 'pb'", repr(policy), "choose one of the two")
    if cap is not None:
        whole("dapple's cap", cap)
    ranks = []
    for i in range(request.stages):
        first = request.stages - i if policy == "pa" else 2 * (request.stages - i) - 1
        k = first if cap is None else min(first, cap)
        ranks.append(sweep(i, request.microbatches, (Op.F, k - 1), (Op.B, 0)))
    return flush(request.straight(), ranks)


def zb_h1(request: ScheduleRequest) -> Schedule:
    """ZB-H1 (Qi et al. 2023): the weight gradient W runs late and fills what would be idle, at 1F1B's memory.

    Rank r holds r weight gradients. Rank 1 of 3, m = 4:

        F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    """
    return _late_weights(request, 1)


def zb_h2(request: ScheduleRequest) -> Schedule:
    """ZB-H2 (Qi et al. 2023): twice the warm-up and twice the weight gradients held of ZB-H1, for twice the memory."""
    return _late_weights(request, 2)


def _late_weights(request: ScheduleRequest, depth: int) -> Schedule:
    """After its warm-up, a rank runs F, I and, once more than `depth` x rank weight gradients wait, a W."""
    p, m = request.stages, request.microbatches
    ranks = [sweep(r, m, (Op.F, depth * (p - 1 - r)), (Op.I, 0), (Op.W, -depth * r)) for r in range(p)]
    return flush(request.straight(), ranks)
