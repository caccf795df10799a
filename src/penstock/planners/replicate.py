"""PipeDream's recursion as a loop over arrays: best pipelines from one state to all others, with replication.

At level k, with m_k components joined at bandwidth B_k:

    T(s->j, m')  = what one stage takes on m' replicas: max(base, r(m')·w)/m', or (base + r(m')·w)/m'
    A(i->j, m)   = min of T(i->j, m) and, over i < s < j and m' < m, max{A(i->s, m-m'), 2a_s/B_k, T(s->j, m')}

`base[d]` is A of the level below on all its components (the sum of seconds at the lowest) for a stage with d
mini-batches in flight, which memory may forbid; `depth[m, m']` is that d for the last m' of the first m components.
"""

from __future__ import annotations

from penstock.core.jit import kernel
from penstock.core.links import FloatArray
from penstock.core.schedule import BoolArray, LongArray


@kernel
def from_state(
    i: int, below: BoolArray, base: FloatArray, which: LongArray, most: LongArray, depth: LongArray,
    weights: FloatArray, rate: FloatArray, added: bool, cut: FloatArray,
    best: FloatArray, split: LongArray, taken: LongArray,
) -> None:  # fmt: skip
    """Fill A (`best`), the state before the last stage (`split`) and its replicas (`taken`), by (j, m)."""
    states, components = best.shape[0], best.shape[1] - 1
    for j in range(i + 1, states):
        if not below[i, j]:
            continue
        for m in range(1, components + 1):
            best[j, m], split[j, m], taken[j, m] = float("inf"), i, m
            d = depth[m, m]
            if d <= most[i, j]:
                compute, reduction = base[which[d], i, j], rate[m] * (weights[j] - weights[i])
                best[j, m] = (compute + reduction if added else max(compute, reduction)) / m
        for s in range(i + 1, j):
            if not (below[i, s] and below[s, j]):
                continue
            worst = 0.0  # a stage or cut that takes this long improves nothing
            for m in range(2, components + 1):
                worst = max(worst, best[j, m])
            if cut[s] >= worst:
                continue
            moved = weights[j] - weights[s]
            for extra in range(1, components):
                last, stage = -1, 0.0
                for m in range(extra + 1, components + 1):
                    d = depth[m, extra]
                    if d > most[s, j]:
                        continue
                    if which[d] != last:
                        last = which[d]
                        compute, reduction = base[last, s, j], rate[extra] * moved
                        stage = (compute + reduction if added else max(compute, reduction)) / extra
                        stage = max(stage, cut[s])
                        if stage >= worst:
                            continue
                    slowest = max(best[s, m - extra], stage)
                    if slowest < best[j, m]:
                        best[j, m], split[j, m], taken[j, m] = slowest, s, extra
