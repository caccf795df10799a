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

from penstock.core.jit import helper, kernel
from penstock.core.links import FloatArray
from penstock.core.schedule import LongArray
from penstock.planners.chain import LayerSums
from penstock.planners.search.candidate import Mode
from penstock.planners.search.places import Places
from penstock.planners.search.space import SearchMethod

MOST_DEPTH = 128
PATIENCE = 6  # further stages that are tried without any gain, where no device is short of memory
KEEP, RECOMPUTE, OFFLOAD = int(Mode.KEEP), int(Mode.RECOMPUTE), int(Mode.OFFLOAD)
MARGIN = 1 - 1e-6  # of a device's memory, since bytes are added in another order than the simulator's


class CutStages(NamedTuple):
    """The stages of a best cut: where they begin and the last one ends, units of each, and what they keep."""

    value: float
    bounds: tuple[int, ...]
    units: tuple[int, ...]
    modes: tuple[Mode, ...]


class Terms(NamedTuple):
    """Parameters of a `SearchMethod`, and of the batch."""

    steps: int
    flush: bool
    slope: int
    turns: bool
    versions: int
    cap: int
    again: bool  # stages may recompute or offload
    meet: bool  # replicas in turns wait for their reduction


class LabelTables(NamedTuple):
    """The best of layers i and on, in d + 1 stages, on the last n units, by (d, i, n)."""

    value: FloatArray
    end: LongArray  # of the first stage, as all below
    units: LongArray
    mode: LongArray
    trip: FloatArray  # seconds of one micro-batch through all the stages and back, where a cap asks for it


class StageKind(NamedTuple):
    """One choice of depth, first layer and devices of a stage, whatever its last layer is."""

    d: int
    i: int
    start: int  # the first unit
    at: int  # number of the replica count
    replicas: int
    share: float  # of a micro-batch's rows that one replica handles
    slow: float  # seconds on its slowest device, as a multiple of the profiled one's
    memory: float  # bytes on each device
    held: float  # of a micro-batch's activations, on one replica
    flying: int  # micro-batches whose activations it keeps
    copies: int  # of the weights


@dataclass(frozen=True, eq=False)
class CutLabels:
    """The best cuts of a chain into every number of stages, on every number of units."""

    places: Places
    tables: LabelTables

    @classmethod
    def of(
        cls,
        sums: LayerSums,
        places: Places,
        method: SearchMethod,
        steps: int,
        again: bool,
        whole: int | None,
        meet: bool = False,
        hurry: Callable[[], bool] = lambda: False,
    ) -> CutLabels:
        """`again`: whether stages may recompute or offload; `whole`: rows that replicas must not split further; `meet`:
        replicas in turns wait for their reduction; `hurry`: whether some depth that has a cut is enough."""
        layers, units = sums.layers, places.units
        depth = min(layers, units, MOST_DEPTH)
        shape = (depth, layers + 1, units + 1)
        value = np.full(shape, np.inf)
        end, count, mode = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        tables = LabelTables(value, end, count, mode, np.zeros(shape if method.cap else (1, 1, 1)))
        most = (
            len(places.counts) if whole is None else int(np.searchsorted(places.counts * places.unit, whole, "right"))
        )
        groups = (
            sums,
            places._replace(counts=places.counts[:most]),
            Terms(steps, method.flush, method.slope, method.turns, method.versions, method.cap, again, meet),
            tables,
        )
        best, since = np.inf, 0
        for d in range(depth):
            _fill(layers * layers * units * max(1, most), *groups, d)
            now = float(value[d, 0].min())
            best, since = (now, 0) if now < best else (best, since + np.isfinite(best))
            if since > PATIENCE or (np.isfinite(best) and hurry()):
                break
        return cls(places, tables)

    @property
    def deepest(self) -> int:
        """Return the most stages that were looked for."""
        return len(self.tables.value)

    def best(self, depth: int) -> CutStages | None:
        """Return the best of so many stages, or None where nothing fits."""
        labels = self.tables
        n = int(np.argmin(labels.value[depth - 1, 0]))
        value = float(labels.value[depth - 1, 0, n])
        if not np.isfinite(value):
            return None
        bounds, units, modes = [0], [], []
        i = 0
        for d in reversed(range(depth)):
            units.append(int(labels.units[d, i, n]))
            modes.append(Mode(int(labels.mode[d, i, n])))
            i, n = int(labels.end[d, i, n]), n - units[-1]
            bounds.append(i)
        assert all(a < b for a, b in pairwise(bounds))
        return CutStages(value, tuple(bounds), tuple(units), tuple(modes))


@helper
def _stage_kind(terms: Terms, places: Places, d: int, i: int, n: int, at: int, units: int) -> StageKind:
    """Return what is in flight on a stage that has the first of the last n units, with d stages behind it."""
    replicas = places.counts[at] * places.unit
    share = 1.0 / replicas
    held = share
    flying = min(terms.steps, terms.slope * d + 1) if terms.slope else terms.steps
    if terms.cap:
        flying = min(flying, terms.cap)
    if terms.turns:
        held = 1.0
        flying = (n * places.unit - 1) // replicas * (terms.steps if replicas > 1 else 1) + 1
    copies = flying if terms.versions == 0 else terms.versions
    start = units - n
    slow, memory = places.slow[start, at], places.room[start, at] * MARGIN
    return StageKind(d, i, start, at, replicas, share, slow, memory, held, flying, copies)


@helper
def _first_end(kind: StageKind, least: FloatArray, left: int, begin: int, last: int, best: float) -> int:
    """Return the first end of the stage whose rest alone is below the best; what ends before has a longer rest."""
    first = max(kind.i + 1, begin)
    while first > kind.i + 1 and least[left, first - 1] < best:
        first -= 1
    while first <= last and least[left, first] >= best:
        first += 1
    return first


@helper
def _fit(
    sums: LayerSums, places: Places, terms: Terms, kind: StageKind, j: int, f: float, b: float
) -> tuple[int, float]:
    """Return what a stage of layers i to j - 1 keeps so that it fits, and the seconds that takes; -1 if it does not."""
    i, memory = kind.i, kind.memory
    base = sums.standing[j] - sums.standing[i] + (kind.copies - 1) * (sums.parameters[j] - sums.parameters[i])
    each = (sums.kept[j] - sums.kept[i]) * kind.held
    if base + kind.flying * each <= memory:
        return KEEP, 0.0
    mode, extra = -1, np.inf
    if terms.again:
        if base + (kind.flying + 1) * sums.cut[i] * kind.held + each <= memory:
            mode, extra = RECOMPUTE, f
        out = each * places.host[kind.start, kind.at]
        late = max(0.0, out - f) + max(0.0, out - b)
        if late < extra and base + 2 * each <= memory:
            mode, extra = OFFLOAD, late
    return mode, extra


@helper
def _alone(sums: LayerSums, places: Places, terms: Terms, kind: StageKind, j: int, pair: float) -> float:
    """Return the value of a stage whose forward and backward take `pair`, with its reduction but nothing behind it."""
    reduction = 0.0
    if kind.replicas > 1:
        moved = sums.parameters[j] - sums.parameters[kind.i]
        reduction = places.rate[kind.start, kind.at] * moved + places.wait[kind.start, kind.at]
    if terms.flush:
        return terms.steps * pair + reduction
    if terms.meet:  # replicas in turns, after each round: they go on with what they have agreed on
        return terms.steps * pair + reduction * kind.share
    return max(terms.steps * pair, reduction * kind.share if terms.turns else reduction)


@helper
def _joined(
    sums: LayerSums,
    places: Places,
    terms: Terms,
    labels: LabelTables,
    kind: StageKind,
    j: int,
    left: int,
    rest: float,
    pair: float,
    total: float,
) -> tuple[float, float]:
    """Return the value of a stage of value `total` with the best rest behind it, of value `rest` on `left` units,
    and the seconds of one micro-batch there and back."""
    m, d = terms.steps, kind.d
    wide = max(kind.replicas, labels.units[d - 1, j, left] * places.unit)
    split = 1.0 if terms.turns else 1.0 / wide
    over = places.hop[kind.start, kind.at] * sums.sent[kind.i, j] * split + places.pause[kind.start, kind.at]
    trip = pair
    if terms.flush:
        total = max(total, pair + 2 * over + rest, m * over)
        if terms.cap:
            trip += 2 * over + labels.trip[d - 1, j, left]
            if d >= terms.cap:
                total = max(total, trip * m / terms.cap)
    else:
        total = max(total, rest, m * over * (1.0 / wide if terms.turns else 1.0))
    return total, trip


@kernel
def _fill(sums: LayerSums, places: Places, terms: Terms, labels: LabelTables, d: int) -> None:
    """Fill the labels of d + 1 stages from those of d."""
    forward, backward, counts = sums.forward, sums.backward, places.counts
    value, end, units_of, mode, trips = labels
    layers, units = value.shape[1] - 1, value.shape[2] - 1
    m, flush, cap = terms.steps, terms.flush, terms.cap
    least = np.full((units + 1, layers + 1), np.inf)  # [n, j]: of the rest, beginning at j or before
    for n in range(units + 1 if d > 0 else 0):
        for j in range(1, layers + 1):
            least[n, j] = min(least[n, j - 1], value[d - 1, j, n])
    begin = np.zeros((units + 1, len(counts)), dtype=np.int64)  # the first j whose rest is not too long, so far
    near = np.full(units + 1, -1)  # the number of the count chosen for i + 1
    for i in range(layers - d - 1, -1, -1):
        for n in range(d + 1, units + 1):
            best, chosen = np.inf, -1
            for turn in range(-1, len(counts)):  # first what was best for i + 1: seldom far off, it cuts the rest short
                at = near[n] if turn < 0 else turn
                if at < 0 or counts[at] > n - d or (d == 0 and counts[at] != n):
                    continue
                kind, left = _stage_kind(terms, places, d, i, n, at, units), n - counts[at]
                first, last = layers, layers - d
                if d > 0 and turn < 0:
                    first = last = end[d, i + 1, n]
                elif d > 0:
                    first = begin[n, at] = _first_end(kind, least, left, begin[n, at], last, best)
                for j in range(first, last + 1):
                    rest = value[d - 1, j, left] if d > 0 else 0.0
                    if rest >= best:
                        continue  # the rest alone takes longer
                    f = (forward[j] - forward[i]) * kind.slow * kind.share
                    b = (backward[j] - backward[i]) * kind.slow * kind.share
                    pair = f + b
                    if m * pair >= best:
                        break  # longer stages take longer still
                    if flush and pair + rest >= best:
                        continue
                    kept, extra = _fit(sums, places, terms, kind, j, f, b)
                    if kept < 0:
                        continue
                    if kept != KEEP:
                        pair = f + (b + extra)
                    total, trip = _alone(sums, places, terms, kind, j, pair), pair
                    if d > 0:
                        total, trip = _joined(sums, places, terms, labels, kind, j, left, rest, pair, total)
                    if total < best:
                        best, chosen = total, at
                        value[d, i, n], end[d, i, n], units_of[d, i, n], mode[d, i, n] = total, j, counts[at], kept
                        if cap:
                            trips[d, i, n] = trip
                if turn < 0:
                    best = np.nextafter(best, np.inf)  # of equal ones the first in order counts
            near[n] = chosen
