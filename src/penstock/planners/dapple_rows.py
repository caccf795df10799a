"""The first stages of DAPPLE plans that use the same devices: a state of the search with its prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.links import FloatArray
from penstock.core.schedule import LongArray
from penstock.planners.placement import Used
from penstock.planners.prefix import Prefix

Devices = tuple[int, ...]
Placed = list[tuple[int, Devices]]  # where each stage ends, and its devices


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
