"""DAPPLE's search, state by state, on arrays: all prefixes of a state grow by one stage at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from penstock.core.between import all_reduce, hand_over
from penstock.core.cluster import Cluster
from penstock.core.links import FloatArray
from penstock.core.schedule import BoolArray, LongArray
from penstock.planners.chain import Chain
from penstock.planners.placement import Used, machines, placements, rest
from penstock.planners.prefix import Prefix

Devices = tuple[int, ...]
Placed = list[tuple[int, Devices]]  # where each stage ends, and its devices


@dataclass(frozen=True, eq=False)
class Rows:
    """Prefixes that use the same devices: where each ends, its last stage's devices, and the one it grew from."""

    used: Used
    ends: LongArray
    sent: FloatArray  # bytes that its last stage sends on
    devices: list[Devices]
    parent: list[tuple[Rows, int] | None]
    sums: Prefix
    scores: FloatArray  # L with the rest as one stage
    bounds: FloatArray  # no plan that begins so has a smaller L

    def placed(self, row: int) -> Placed:
        found: Placed = []
        rows, at = self, row
        while rows.parent[at] is not None:
            found.append((int(rows.ends[at]), rows.devices[at]))
            rows, at = rows.parent[at]  # type: ignore[misc]
        return found[::-1]


@dataclass(eq=False)
class Search:
    """One search: costs of stages and hops on devices, remembered, and the best plan so far."""

    chain: Chain
    cluster: Cluster
    microbatches: int
    keep: int | None
    best: float = inf
    plan: Placed | None = None

    def __post_init__(self) -> None:
        self._hops: dict[tuple[Devices, Devices], tuple[float, float]] = {}

    @cached_property
    def size(self) -> int:
        return machines(self.cluster)[1]

    def run(self) -> None:
        layers, total = self.chain.layers, len(self.cluster.devices)
        start: Used = (0,) * machines(self.cluster)[0]
        root = Rows(
            start, np.zeros(1, dtype=np.int64), np.zeros(1), [()], [None], Prefix.empty(), np.zeros(1), np.zeros(1)
        )
        everything = rest(start, self.size)
        one = self.stage(root.sums, np.zeros(1, dtype=np.int64), np.array([layers]), everything)
        self.offer(one[0].latency, one[1], lambda _: [(layers, everything)])
        waiting: dict[Used, list[Rows]] = {start: [root]} if layers > 1 else {}
        while waiting:
            used = min(waiting, key=lambda u: (sum(u), u))
            rows = self.narrowed(waiting.pop(used))
            for count in range(1, total - sum(used)) if len(rows.ends) else ():
                for after, devices in placements(used, self.size, count):
                    grown = self.extended(rows, after, devices)
                    if grown is not None:
                        waiting.setdefault(after, []).append(grown)

    def extended(self, rows: Rows, after: Used, devices: Devices) -> Rows | None:
        """Every prefix with one stage more on `devices`, for every end; all of them complete plans with the rest."""
        layers, left = self.chain.layers, rest(after, self.size)
        ends = np.arange(1, layers)
        hops = np.array([self.hop(mine, devices) if mine else (0.0, 0.0) for mine in rows.devices])
        sums = self.crossed(rows.sums, hops[:, 0] * rows.sent + hops[:, 1] * (rows.ends > 0), rows.ends)
        sums, fits = self.stage(sums.column(), rows.ends[:, None], ends[None, :], devices)
        seconds, wait = self.hop(devices, left)
        sent = self.chain.sent[rows.ends][:, ends]
        hop = seconds * sent + wait
        full = sums.grown(hop, hop, hop * 0.0, self.microbatches)
        full, rest_fits = self.stage(full, ends[None, :], np.array([[layers]]), left)
        good = fits & (ends[None, :] > rows.ends[:, None])
        scores = np.where(good, full.latency, inf)
        self.offer(
            scores.ravel(), (good & rest_fits).ravel(),
            lambda at: [*rows.placed(at // len(ends)), (int(ends[at % len(ends)]), devices), (layers, left)],
        )  # fmt: skip
        return self.chosen(rows, after, devices, sent, sums, scores, self.bound(sums, ends, len(left)))

    def bound(self, sums: Prefix, ends: LongArray, devices: int) -> FloatArray:
        """What is left takes its time on the devices left, however it is cut: some stage works at least the mean."""
        fastest = max(device.speed for device in self.cluster.devices)
        work = self.chain.forward + self.chain.backward
        left = (work[-1] - work[ends]) / (devices * fastest)
        found: FloatArray = np.maximum(sums.peak, sums.work + self.microbatches * left)
        return found

    def chosen(
        self,
        rows: Rows,
        after: Used,
        devices: Devices,
        sent: FloatArray,
        sums: Prefix,
        scores: FloatArray,
        bounds: FloatArray,
    ) -> Rows | None:
        """The new prefixes that are worth growing."""
        row, column = np.nonzero(scores < inf)
        at = self.kept(column, scores[row, column], bounds[row, column])
        row, column = row[at], column[at]
        if not len(row):
            return None
        parents: list[tuple[Rows, int] | None] = [(rows, int(parent)) for parent in row]
        figures = (sums.pick(row, column), scores[row, column], bounds[row, column])
        return Rows(after, column + 1, sent[row, column], [devices] * len(row), parents, *figures)

    def narrowed(self, several: list[Rows]) -> Rows:
        """The prefixes of one state together, again those worth growing."""
        ends, sent, scores, bounds = (
            np.concatenate([getattr(rows, name) for rows in several]) for name in ("ends", "sent", "scores", "bounds")
        )
        at = self.kept(ends, scores, bounds)
        whose = [(mine, parent) for rows in several for mine, parent in zip(rows.devices, rows.parent, strict=True)]
        devices, parents = [whose[i][0] for i in at], [whose[i][1] for i in at]
        sums = Prefix.joined([rows.sums for rows in several]).pick(at)
        return Rows(several[0].used, ends[at], sent[at], devices, parents, sums, scores[at], bounds[at])

    def kept(self, ends: LongArray, scores: FloatArray, bounds: FloatArray) -> LongArray:
        """Which of many to grow: those with the least L for each end.

        Where more than the published one is kept, what cannot beat the best plan so far gives its place to others.
        """
        if self.keep == 1:
            return _least(ends, scores, 1)
        alive = np.flatnonzero(bounds < self.best)
        return alive if self.keep is None else alive[_least(ends[alive], scores[alive], self.keep)]

    def stage(self, sums: Prefix, first: LongArray, last: LongArray, devices: Devices) -> tuple[Prefix, BoolArray]:
        """Prefixes with the layers from `first` up to `last` as a stage, and whether it fits its devices."""
        chain, kinds = self.chain, [self.cluster.devices[d] for d in devices]
        pace = len(devices) * min(kind.speed for kind in kinds)  # replicas split each micro-batch
        each, wait = all_reduce(self.cluster, devices)
        forward = (chain.forward[last] - chain.forward[first]) / pace
        backward = (chain.backward[last] - chain.backward[first]) / pace
        reduce = each * (chain.parameters[last] - chain.parameters[first]) + wait
        held = chain.standing[last] - chain.standing[first] + (chain.kept[last] - chain.kept[first]) / len(devices)
        fits: BoolArray = held <= min(kind.memory for kind in kinds) * (1 + 1e-9)
        return sums.grown(forward, backward, reduce, self.microbatches), fits

    def crossed(self, sums: Prefix, seconds: FloatArray, ends: LongArray) -> Prefix:
        """Prefixes with the transfer to the next stage; nothing is sent where nothing was placed."""
        grown = sums.grown(seconds, seconds, seconds * 0.0, self.microbatches)
        parts = zip(grown.parts, sums.parts, strict=True)
        return Prefix(*(np.where(ends > 0, new, old) for new, old in parts))

    def hop(self, senders: Devices, receivers: Devices) -> tuple[float, float]:
        key = (senders, receivers)
        if key not in self._hops:
            self._hops[key] = hand_over(self.cluster, senders, receivers)
        return self._hops[key]

    def offer(self, scores: FloatArray, fits: BoolArray, plan: Callable[[int], Placed]) -> None:
        """Remember the best complete plan."""
        scores = np.where(fits, scores, inf).ravel()
        at = int(np.argmin(scores))
        if scores[at] < self.best:
            self.best, self.plan = float(scores[at]), plan(at)


def _least(groups: LongArray, values: FloatArray, count: int) -> LongArray:
    """The `count` least of each group."""
    order = np.lexsort((values, groups))
    firsts = np.searchsorted(groups[order], groups[order])
    return order[np.arange(len(order)) - firsts < count]
