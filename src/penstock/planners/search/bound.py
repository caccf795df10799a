"""Seconds that no plan can beat: the dynamic programme with all that might cost time left out or at its cheapest.

Devices are all as fast as the fastest, links as quick as the quickest. Each part is true of every plan with stages in a
row, whatever its order of actions:

    a stage starts when the first micro-batch has come to it, then has all its work to do, and its reduction
    the last micro-batch's gradient goes back through all earlier stages
    without a flush, a mini-batch takes the busiest stage's, link's or reduction's time

Of plans with several chunks a rank only this is used: somebody does at least the mean of the work.
"""

from __future__ import annotations

import numpy as np

from penstock.core.cluster import Cluster
from penstock.core.jit import kernel
from penstock.core.links import FloatArray, ring_seconds
from penstock.core.profile import Profile
from penstock.core.schedule import LongArray
from penstock.planners.chain import LayerSums
from penstock.planners.search.places import replica_counts
from penstock.planners.search.space import SearchMethod

MOST_EXACT = 64  # replicas up to which every count is looked at


def lower_bound(
    profile: Profile, cluster: Cluster, methods: tuple[SearchMethod, ...], steps: int, replicas: int | None = None
) -> float:
    """Return the least seconds that `steps` micro-batches of the profile can take, by any of these methods.

    `replicas` is the most that a stage may have.
    """
    speed = max(device.speed for device in cluster.devices)
    chain = LayerSums.of(profile, speed)
    both = _sums([min(layer.backward, layer.input_grad + layer.weight_grad) / speed for layer in profile.layers])
    back = _sums([min(layer.backward, layer.input_grad) / speed for layer in profile.layers])
    chain = chain._replace(backward=both)
    work = steps * float(chain.forward[-1] + chain.backward[-1])
    most = len(cluster.devices) if replicas is None else min(len(cluster.devices), replicas)
    mean = work * speed / sum(sorted((device.speed for device in cluster.devices), reverse=True)[: most * chain.layers])
    if any(method.chunks > 1 for method in methods):
        return mean
    quickest = _links(profile, cluster)
    kinds = {method.flush for method in methods}
    return max(mean, min(_straight(chain, back, cluster, flush, steps, quickest, most) for flush in kinds))


def _sums(values: list[float]) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(values)))


def _links(profile: Profile, cluster: Cluster) -> float:
    """Return seconds a byte of the quickest link; 0 where outputs may pass stages by, on links of their own."""
    rates = [level.bandwidth for level in cluster.levels if level.size > 1]
    in_a_row = all(b == a + 1 for a, b in profile.edges)
    return 1.0 / max(rates) if rates and in_a_row else 0.0


def _straight(
    chain: LayerSums, back: FloatArray, cluster: Cluster, flush: bool, steps: int, quickest: float, replicas: int
) -> float:
    devices = min(len(cluster.devices), replicas * chain.layers)
    least, most = _ranges(replicas)
    reduce = np.array([_cheapest_reduction(cluster, int(a), int(b)) for a, b in zip(least, most, strict=True)])
    values = []
    for late in (False, True) if flush else (False,):
        value = np.full((chain.layers + 1, devices + 1), np.inf)
        _least(
            chain.layers * chain.layers * devices * len(most),
            *(chain.forward, chain.backward, back, chain.parameters, chain.cut),
            *(least, most, reduce, quickest, steps, flush, late, value),
        )
        values.append(float(value[0].min()))
    return max(values)


def _ranges(replicas: int) -> tuple[LongArray, LongArray]:
    """Return replica counts as ranges: each costs the devices of its least and has the speed of its greatest."""
    if replicas <= MOST_EXACT:
        every = np.arange(1, replicas + 1)
        return every, every
    upper = replica_counts(replicas)
    return np.concatenate(([1], upper[:-1] + 1)), upper


def _cheapest_reduction(cluster: Cluster, least: int, most: int) -> float:
    """Return seconds a byte of an all-reduce over that many devices, on the quickest links that hold so many."""
    if least < 2:
        return 0.0
    rate, room = 0.0, 1
    for level in cluster.levels:
        room *= level.size
        if room >= least:
            rate = max(rate, level.reduce_rate(most))
    return ring_seconds(least, 1.0, rate)


@kernel
def _least(
    forward: FloatArray, backward: FloatArray, inner: FloatArray, parameters: FloatArray, cut: FloatArray,
    least: LongArray, most: LongArray, reduce: FloatArray, quickest: float, m: int, flush: bool, late: bool,
    value: FloatArray,
) -> None:  # fmt: skip
    layers, devices = value.shape[0] - 1, value.shape[1] - 1
    for i in range(layers - 1, -1, -1):
        for n in range(1, devices + 1):
            best = np.inf
            for at in range(len(least)):
                if least[at] > n:
                    break
                r = most[at]
                for j in range(i + 1, layers + 1):
                    f = (forward[j] - forward[i]) / r
                    own = m * (f + (backward[j] - backward[i]) / r)
                    passed = f + (inner[j] - inner[i]) / r
                    if flush and not late:
                        own = m * passed
                    elif flush:
                        own += reduce[at] * (parameters[j] - parameters[i])
                        passed = f
                    else:
                        own = max(own, reduce[at] * (parameters[j] - parameters[i]) / r)
                    if own >= best:
                        break
                    if j < layers:
                        left = n - least[at]
                        if left < 1:
                            continue
                        over = quickest * cut[j] / (r + left - 1)
                        if flush:
                            own = max(own, passed + over * (1.0 if late else 2.0) + value[j, left], m * over)
                        else:
                            own = max(own, value[j, left], m * over / max(1, min(r, left)))
                    best = min(best, own)
            value[i, n] = min(best, value[i, n - 1])
