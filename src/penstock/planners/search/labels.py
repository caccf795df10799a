"""The best cut for every number of stages, by dynamic programming from the last stage to the first, under memory.

With d stages behind it, a stage of layers i to j - 1 on r of the last n units takes t a micro-batch, forward f, and

    with a flush       value = max(m·t + reduction, f + b + there and back + value of the rest)
    without            value = max(m·t, reduction, m·hop, value of the rest); in turns, m·t + reduction

for m micro-batches: the first is the time from the stage's first forward to the end of all (the stage that computes
most sets the pace, the ones before it fill and drain), the second the pace itself. Both grow with the rest's value, so
the least of the rest is all that has to be known of it. A stage whose activations do not fit, as many as its depth has
in flight, recomputes or offloads them, whichever is faster. With at most k in flight, the value is at least m/k times
the way of one micro-batch through the stage and all behind it and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.core.jit import kernel
from penstock.core.links import FloatArray
from penstock.core.schedule import LongArray
from penstock.planners.chain import Chain
from penstock.planners.search.candidate import Mode
from penstock.planners.search.places import Places
from penstock.planners.search.space import Method

MOST_DEPTH = 128
PATIENCE = 6  # further stages that are tried without any gain, where no device is short of memory
KEEP, RECOMPUTE, OFFLOAD = int(Mode.KEEP), int(Mode.RECOMPUTE), int(Mode.OFFLOAD)
MARGIN = 1 - 1e-6  # of a device's memory, since bytes are added in another order than the simulator's


class Stages(NamedTuple):
    """A label read back: where stages begin and the last one ends, units of each, and what they keep."""

    value: float
    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    modes: tuple[Mode, ...]


@dataclass(frozen=True, eq=False)
class Labels:
    """value[d, i, n]: the least for layers i and on, in d + 1 stages, on the last n units."""

    places: Places
    value: FloatArray
    end: LongArray
    count: LongArray
    mode: LongArray

    @classmethod
    def of(
        cls,
        chain: Chain,
        places: Places,
        method: Method,
        steps: int,
        again: bool,
        whole: int | None,
        meet: bool = False,
        hurry: Callable[[], bool] = lambda: False,
    ) -> Labels:
        """`again`: whether stages may recompute or offload; `whole`: rows that replicas must not split further; `meet`:
        replicas in turns wait for their reduction; `hurry`: whether some depth that has a cut is enough."""
        layers, units = chain.layers, places.units
        depth = min(layers, units, MOST_DEPTH)
        shape = (depth, layers + 1, units + 1)
        trip = np.zeros(shape if method.cap else (1, 1, 1))
        value = np.full(shape, np.inf)
        end, count, mode = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        most = (
            len(places.counts) if whole is None else int(np.searchsorted(places.counts * places.unit, whole, "right"))
        )
        best, since = np.inf, 0
        for d in range(depth):
            _fill(
                layers * layers * units * max(1, most),
                *(chain.forward, chain.backward, chain.parameters, chain.standing, chain.kept, chain.cut, chain.sent),
                *(places.counts[:most], places.unit, places.slow, places.room, places.rate, places.wait),
                *(places.hop, places.pause, places.host),
                *(d, steps, method.flush, method.slope, method.turns, method.versions, again, meet),
                *(method.cap, trip, value, end, count, mode),
            )
            now = float(value[d, 0].min())
            best, since = (now, 0) if now < best else (best, since + np.isfinite(best))
            if since > PATIENCE or (np.isfinite(best) and hurry()):
                break
        return cls(places, value, end, count, mode)

    def best(self, depth: int) -> Stages | None:
        """The best of so many stages, or None where nothing fits."""
        at = int(np.argmin(self.value[depth - 1, 0]))
        if not np.isfinite(self.value[depth - 1, 0, at]):
            return None
        bounds, counts, modes = [0], [], []
        value, i, n = float(self.value[depth - 1, 0, at]), 0, at
        for d in reversed(range(depth)):
            counts.append(int(self.count[d, i, n]))
            modes.append(Mode(int(self.mode[d, i, n])))
            i, n = int(self.end[d, i, n]), n - counts[-1]
            bounds.append(i)
        assert all(a < b for a, b in pairwise(bounds))
        return Stages(value, tuple(bounds), tuple(counts), tuple(modes))


@kernel
def _fill(
    forward: FloatArray, backward: FloatArray, parameters: FloatArray, standing: FloatArray, kept: FloatArray,
    cut: FloatArray, sent: FloatArray, counts: LongArray, unit: int, slow: FloatArray, room: FloatArray,
    rate: FloatArray, wait: FloatArray, hop: FloatArray, pause: FloatArray, host: FloatArray,
    d: int, m: int, flush: bool, slope: int, turns: bool, versions: int, again: bool, meet: bool,
    cap: int, trip: FloatArray, value: FloatArray, end: LongArray, count: LongArray, mode: LongArray,
) -> None:  # fmt: skip
    layers, units = value.shape[1] - 1, value.shape[2] - 1
    live = min(m, slope * d + 1) if slope else m
    if cap:
        live = min(live, cap)
    least = np.full((units + 1, layers + 1), np.inf)  # [n, j]: of the rest, beginning at j or before
    for n in range(units + 1 if d > 0 else 0):
        for j in range(1, layers + 1):
            least[n, j] = min(least[n, j - 1], value[d - 1, j, n])
    begin = np.zeros((units + 1, len(counts)), dtype=np.int64)  # the first j whose rest is not too long, so far
    near = np.full(units + 1, -1)  # the number of the count chosen for i + 1
    for i in range(layers - d - 1, -1, -1):
        for n in range(d + 1, units + 1):
            best, start, found = np.inf, units - n, -1
            for turn in range(-1, len(counts)):  # first what was best for i + 1: seldom far off, it cuts the rest short
                at = near[n] if turn < 0 else turn
                if at < 0:
                    continue
                c = counts[at]
                if c > n - d or (d == 0 and c != n):
                    continue
                r = c * unit
                share = 1.0 / r
                first, last = i + 1, layers - d
                if d == 0:
                    first = layers
                elif turn < 0:
                    first = last = end[d, i + 1, n]
                else:
                    first = max(first, begin[n, at])
                    while first > i + 1 and least[n - c, first - 1] < best:
                        first -= 1
                    while first <= last and least[n - c, first] >= best:
                        first += 1
                    begin[n, at] = first
                held = share  # of a micro-batch's activations, on one replica
                flying, memory = live, room[start, at] * MARGIN
                if turns:
                    held = 1.0
                    flying = (n * unit - 1) // r * (m if r > 1 else 1) + 1
                copies = flying if versions == 0 else versions
                for j in range(first, last + 1):
                    rest = value[d - 1, j, n - c] if d > 0 else 0.0
                    if rest >= best:
                        continue  # the rest alone takes longer
                    f = (forward[j] - forward[i]) * slow[start, at] * share
                    b = (backward[j] - backward[i]) * slow[start, at] * share
                    if m * (f + b) >= best:
                        break  # longer stages take longer still
                    if flush and f + b + rest >= best:
                        continue
                    base = standing[j] - standing[i] + (copies - 1) * (parameters[j] - parameters[i])
                    each = (kept[j] - kept[i]) * held
                    chosen = KEEP
                    if base + flying * each > memory:
                        if not again:
                            continue
                        chosen = -1
                        extra = np.inf
                        if base + (flying + 1) * cut[i] * held + each <= memory:
                            chosen, extra = RECOMPUTE, f
                        out = each * host[start, at]
                        late = max(0.0, out - f) + max(0.0, out - b)
                        if late < extra and base + 2 * each <= memory:
                            chosen, extra = OFFLOAD, late
                        if chosen < 0:
                            continue
                        b += extra
                    reduction = rate[start, at] * (parameters[j] - parameters[i]) + wait[start, at] if r > 1 else 0.0
                    if flush:
                        total = m * (f + b) + reduction
                    elif meet:  # replicas in turns, after each round: they go on with what they have agreed on
                        total = m * (f + b) + reduction * share
                    else:
                        total = max(m * (f + b), reduction * share if turns else reduction)
                    way = f + b  # of one micro-batch, there and back
                    if d > 0:
                        wide = max(r, count[d - 1, j, n - c] * unit)
                        over = hop[start, at] * sent[i, j] * (1.0 if turns else 1.0 / wide) + pause[start, at]
                        if flush:
                            total = max(total, f + b + 2 * over + rest, m * over)
                            if cap:
                                way += 2 * over + trip[d - 1, j, n - c]
                                if d >= cap:
                                    total = max(total, way * m / cap)
                        else:
                            total = max(total, rest, m * over * (1.0 / wide if turns else 1.0))
                    if total < best:
                        best, found = total, at
                        value[d, i, n], end[d, i, n], count[d, i, n], mode[d, i, n] = total, j, c, chosen
                        if cap:
                            trip[d, i, n] = way
                if turn < 0:
                    best = np.nextafter(best, np.inf)  # of equal ones the first in order counts
            near[n] = found
