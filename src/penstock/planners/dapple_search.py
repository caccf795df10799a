"""DAPPLE's search, state by state, on arrays: all prefixes of a state grow by one stage at once.

States come in the order of the devices they use. On few machines that is all; on four of eight there are thousands of
states, most of which lead nowhere. So a prefix is dropped when no plan that begins so can beat the best one met, and of
what is left with equally many devices used, the best WIDTH grow, over all states (FEWEST where there are many). Best is
one half by L with the rest as one stage, the other by the least L that any rest could give: where all-reduces are slow,
the rest as one stage says little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from penstock.core.cluster import Cluster
from penstock.core.links import FloatArray
from penstock.core.schedule import BoolArray, LongArray
from penstock.planners.chain import LayerSums
from penstock.planners.dapple_devices import DeviceFigures, Devices, Teams, Used, deep, machines, placements, rest
from penstock.planners.dapple_prefixes import Placed, Prefix, PrefixRows

WIDTH, FEWEST = 1024, 256
AT_ONCE = 1 << 17  # entries of an array: small enough for the processor's own memory


class Move(NamedTuple):
    """One way to place the next stage."""

    after: Used
    devices: Devices
    left: Devices


@dataclass(eq=False)
class Search:
    """One search: costs of stages and hops on devices, remembered, and the best plan so far."""

    chain: LayerSums
    cluster: Cluster
    microbatches: int
    keep: int | None
    best: float = inf
    plan: Placed | None = None

    def __post_init__(self) -> None:
        self.figures = DeviceFigures(self.cluster)

    def run(self) -> None:
        layers, total = self.chain.layers, len(self.cluster.devices)
        start: Used = (0,) * machines(self.cluster)[0]
        nothing, none = np.zeros(1), np.zeros(1, dtype=np.int64)
        root = PrefixRows(start, none, nothing, [()], [None], Prefix.empty(), nothing, nothing)
        everything = rest(start, self.figures.size)
        one, fits = self.stage(root.sums, none, np.array([layers]), self.figures.teams([everything]))
        self.offer(one.latency, fits, lambda _: [(layers, everything)])
        waiting: dict[Used, list[PrefixRows]] = {start: [root]} if layers > 1 else {}
        for done in range(total if waiting else 0):
            here = sorted(used for used in waiting if sum(used) == done)
            for rows in self.widest([self.narrowed(PrefixRows.joined(waiting.pop(used))) for used in here]):
                for grown in self.grown(rows):
                    waiting.setdefault(grown.used, []).append(grown)

    def grown(self, rows: PrefixRows) -> Iterator[PrefixRows]:
        """Yield the prefixes of a state with one stage more: every count of devices, every placement, every end."""
        left = len(self.cluster.devices) - sum(rows.used)
        moves = [
            Move(after, devices, rest(after, self.figures.size))
            for count in range(1, left)
            for after, devices in placements(rows.used, self.figures.size, count)
        ]
        some = max(1, AT_ONCE // (len(rows.ends) * self.chain.layers))
        for first in range(0, len(moves), some):
            yield from self.extended(rows, moves[first : first + some])

    def extended(self, rows: PrefixRows, moves: list[Move]) -> Iterator[PrefixRows]:
        """Grow prefixes by some moves. Arrays are by (move, prefix, end); with the rest as one stage each is a plan."""
        layers, ends = self.chain.layers, np.arange(1, self.chain.layers)
        hops = self.hops_into(rows, moves)
        sums = self.crossed(rows.sums, hops[0] * rows.sent + hops[1] * (rows.ends > 0), rows.ends)
        placed = self.figures.teams([move.devices for move in moves])
        sums, fits = self.stage(sums.column(), rows.ends[:, None], ends, placed)
        sent = self.chain.sent[rows.ends][:, ends]
        seconds, wait = deep([self.figures.hop(move.devices, move.left) for move in moves])
        hop = seconds * sent + wait
        full = sums.grown(hop, hop, hop * 0.0, self.microbatches)
        others = self.figures.teams([move.left for move in moves])
        full, rest_fits = self.stage(full, ends, np.array(layers), others)
        good = fits & (ends > rows.ends[:, None])
        scores = np.where(good, full.latency, inf)

        def plan(at: int) -> Placed:
            move, row, end = (int(place) for place in np.unravel_index(at, scores.shape))
            return [*rows.placed(row), (int(ends[end]), moves[move].devices), (layers, moves[move].left)]

        self.offer(scores, good & rest_fits, plan)
        yield from self.chosen(rows, moves, sent, sums, scores, self.bound(sums, ends, others.size))

    def bound(self, sums: Prefix, ends: LongArray, devices: FloatArray) -> FloatArray:
        """Return an L that no plan with such a prefix beats: on the devices left, some stage works at least the mean.

        What the all-reduces of the stages placed leave exposed only grows: the pivot can only move on.
        """
        fastest = max(device.speed for device in self.cluster.devices)
        work = self.chain.forward + self.chain.backward
        left = (work[-1] - work[ends]) / (devices * fastest)
        bound: FloatArray = np.maximum(sums.peak, sums.work + self.microbatches * left) + np.maximum(sums.end, 0.0)
        return bound

    def chosen(
        self,
        rows: PrefixRows,
        moves: list[Move],
        sent: FloatArray,
        sums: Prefix,
        scores: FloatArray,
        bounds: FloatArray,
    ) -> Iterator[PrefixRows]:
        """Yield the new prefixes that are worth growing, by move."""
        index = np.nonzero(scores < inf)
        at = self.kept(index[0] * self.chain.layers + index[2], scores[index], bounds[index])
        move, row, end = index = tuple(part[at] for part in index)
        picked = (sums.pick(*index), scores[index], bounds[index])
        whose = np.searchsorted(move, np.arange(len(moves) + 1))
        for number, (first, last) in enumerate(pairwise(whose.tolist())):
            if first < last:
                these = np.arange(first, last)
                parents: list[tuple[PrefixRows, int] | None] = [(rows, parent) for parent in row[these].tolist()]
                figures = (picked[0].pick(these), picked[1][these], picked[2][these])
                devices = [moves[number].devices] * len(these)
                yield PrefixRows(
                    moves[number].after, end[these] + 1, sent[row[these], end[these]], devices, parents, *figures
                )

    def narrowed(self, rows: PrefixRows) -> PrefixRows:
        """Return the prefixes of one state that are worth growing."""
        return rows.pick(self.kept(rows.ends, rows.scores, rows.bounds))

    def widest(self, states: list[PrefixRows]) -> list[PrefixRows]:
        """Return the best prefixes of states that use equally many devices; all, where one a state or all are kept."""
        states = [rows for rows in states if len(rows.ends)]
        width = max(WIDTH // max(len(states), 1), FEWEST)
        if self.keep in (1, None) or sum(len(rows.ends) for rows in states) <= width:
            return states
        score, bound = (
            np.partition(np.concatenate([getattr(rows, name) for rows in states]), width // 2)[width // 2]
            for name in ("scores", "bounds")
        )
        best = [np.flatnonzero((rows.scores <= score) | (rows.bounds <= bound)) for rows in states]
        return [rows.pick(at) for rows, at in zip(states, best, strict=True) if len(at)]

    def kept(self, groups: LongArray, scores: FloatArray, bounds: FloatArray) -> LongArray:
        """Return which to grow, by group: the published one, with the least L, or the best of those that may win."""
        if self.keep == 1:
            return _least(groups, scores, 1)
        alive = np.flatnonzero(bounds < self.best)
        if self.keep is None:
            return alive
        half = self.keep // 2
        parts = (_least(groups[alive], scores[alive], self.keep - half), _least(groups[alive], bounds[alive], half))
        either = alive[np.union1d(*parts)]
        return either[np.argsort(groups[either], kind="stable")]

    def stage(self, sums: Prefix, first: LongArray, last: LongArray, teams: Teams) -> tuple[Prefix, BoolArray]:
        """Return prefixes with the layers from `first` up to `last` as a stage, and whether it fits its devices."""
        chain = self.chain
        forward = (chain.forward[last] - chain.forward[first]) / teams.pace
        backward = (chain.backward[last] - chain.backward[first]) / teams.pace
        reduce = teams.each * (chain.parameters[last] - chain.parameters[first]) + teams.wait
        held = chain.standing[last] - chain.standing[first] + (chain.kept[last] - chain.kept[first]) / teams.size
        fits: BoolArray = held <= teams.room * (1 + 1e-9)
        return sums.grown(forward, backward, reduce, self.microbatches), fits

    def crossed(self, sums: Prefix, seconds: FloatArray, ends: LongArray) -> Prefix:
        """Return prefixes with the transfer to the next stage; nothing is sent where nothing was placed."""
        grown = sums.grown(seconds, seconds, seconds * 0.0, self.microbatches)
        parts = zip(grown.parts, sums.parts, strict=True)
        return Prefix(*(np.where(ends > 0, new, old) for new, old in parts))

    def hops_into(self, rows: PrefixRows, moves: list[Move]) -> FloatArray:
        """Seconds a byte and latency of the hops by (move, prefix); many prefixes end on the same devices."""
        ends = {devices: at for at, devices in enumerate(dict.fromkeys(rows.devices))}
        which = [ends[devices] for devices in rows.devices]
        hops = [
            [self.figures.hop(senders, move.devices) if senders else (0.0, 0.0) for senders in ends] for move in moves
        ]
        return np.array(hops).transpose(2, 0, 1)[:, :, which]

    def offer(self, scores: FloatArray, fits: BoolArray, plan: Callable[[int], Placed]) -> None:
        """Remember the best complete plan."""
        scores = np.where(fits, scores, inf).ravel()
        at = int(np.argmin(scores))
        if scores[at] < self.best:
            self.best, self.plan = float(scores[at]), plan(at)


def _least(groups: LongArray, values: FloatArray, count: int) -> LongArray:
    """Return the `count` least of each group."""
    order = np.lexsort((values, groups))
    firsts = np.searchsorted(groups[order], groups[order])
    return order[np.arange(len(order)) - firsts < count]
