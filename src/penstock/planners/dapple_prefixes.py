"""The first stages of DAPPLE plans, summed up so that adding a stage to all of them is a few array operations.

L = Tw + Ts + Te over an extended list, in which each transfer is an entry of its own between two stages: Tw, the
warm-up, is the first forward down to the pivot Q; Ts, the steady phase, is M - 1 more pairs on Q; Te, the end, is the
last backward up from Q and the all-reduces that hide behind it or do not. With PB(s) the backward seconds before entry
s, L = g(Q) + E, where

    g(s) = sum of F + B up to s, and (M-1)(F_s + B_s);   the pivot Q is the last entry at which g is greatest
    E    = the greatest of AR_s - PB(s) for s <= Q, and of AR_s - PB(s) - B_s - B_Q for s > Q

which grows from the front one entry at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.links import FloatArray
from penstock.core.schedule import LongArray
from penstock.planners.dapple_devices import Devices, Used

Placed = list[tuple[int, Devices]]  # where each stage ends, and its devices


@dataclass(frozen=True, eq=False)
class Prefix:
    """Arrays of one shape, an entry for each of many prefixes."""

    work: FloatArray  # sum of F + B
    backward: FloatArray  # PB of the next entry
    peak: FloatArray  # g(Q)
    end_if_later: FloatArray  # E if the pivot is yet to come
    end: FloatArray  # E with the pivot found so far
    pivot_backward: FloatArray  # B_Q

    @classmethod
    def empty(cls, count: int = 1) -> Prefix:
        zero, never = np.zeros(count), np.full(count, -np.inf)
        return cls(zero, zero, never, never, never, zero)

    @property
    def latency(self) -> FloatArray:
        return self.peak + self.end

    def grown(self, forward: FloatArray, backward: FloatArray, reduce: FloatArray, microbatches: int) -> Prefix:
        """Add one entry; arrays broadcast."""
        pair = forward + backward
        work = self.work + pair
        steady, exposed = work + (microbatches - 1) * pair, reduce - self.backward
        later = np.maximum(self.end_if_later, exposed)
        moves = steady >= self.peak
        return Prefix(
            work,
            self.backward + backward,
            np.where(moves, steady, self.peak),
            later,
            np.where(moves, later, np.maximum(self.end, exposed - backward - self.pivot_backward)),
            np.where(moves, backward, self.pivot_backward),
        )

    def column(self) -> Prefix:
        """Return one prefix a row, to be joined with one of the next stage's ends a column."""
        return Prefix(*(values[..., None] for values in self.parts))

    def pick(self, *index: LongArray) -> Prefix:
        return Prefix(*(values[index] for values in self.parts))

    @property
    def parts(self) -> tuple[FloatArray, ...]:
        return (self.work, self.backward, self.peak, self.end_if_later, self.end, self.pivot_backward)

    @classmethod
    def joined(cls, several: list[Prefix]) -> Prefix:
        return cls(*(np.concatenate(values) for values in zip(*(one.parts for one in several), strict=True)))


@dataclass(frozen=True, eq=False)
class PrefixRows:
    """Prefixes that use the same devices: end and last devices of each, and the prefix it was grown from."""

    used: Used
    ends: LongArray
    sent: FloatArray  # bytes that its last stage sends on
    devices: list[Devices]
    parent: list[tuple[PrefixRows, int] | None]
    sums: Prefix
    scores: FloatArray  # L with the rest as one stage
    bounds: FloatArray  # no plan that begins so has a smaller L

    def pick(self, at: LongArray) -> PrefixRows:
        devices, parents = [self.devices[i] for i in at], [self.parent[i] for i in at]
        figures = (self.sums.pick(at), self.scores[at], self.bounds[at])
        return PrefixRows(self.used, self.ends[at], self.sent[at], devices, parents, *figures)

    @classmethod
    def joined(cls, several: list[PrefixRows]) -> PrefixRows:
        """Join the prefixes of one state that come from different parents."""
        ends, sent, scores, bounds = (
            np.concatenate([getattr(rows, name) for rows in several]) for name in ("ends", "sent", "scores", "bounds")
        )
        devices, parents = ([one for rows in several for one in getattr(rows, name)] for name in ("devices", "parent"))
        sums = Prefix.joined([rows.sums for rows in several])
        return cls(several[0].used, ends, sent, devices, parents, sums, scores, bounds)

    def placed(self, row: int) -> Placed:
        placed: Placed = []
        rows, at = self, row
        while rows.parent[at] is not None:
            placed.append((int(rows.ends[at]), rows.devices[at]))
            rows, at = rows.parent[at]  # type: ignore[misc]
        return placed[::-1]
