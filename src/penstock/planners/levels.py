"""One level of PipeDream's hierarchy: its figures, and the tables that the level above builds on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from penstock.core.cluster import Level
from penstock.core.links import FloatArray
from penstock.core.schedule import LongArray
from penstock.errors import InputError
from penstock.planners.ideals import Ideals
from penstock.planners.replicate import from_state

UNBOUNDED = 2**40
Inputs = tuple[FloatArray, LongArray, LongArray]  # base, which and most of the kernel
Table = tuple[FloatArray, LongArray, LongArray]  # A, the state before the last stage, its replicas: by (state, m)

# Seconds a byte of weights over m replicas at rate B: the paper's formula; its text's other reading; its code's, which
# adds them to the compute.
CONSTANTS: dict[str, tuple[Callable[[int], float], bool]] = {
    "paper": (lambda m: 2.0 * (m - 1), False),
    "text": (lambda m: 2.0 * (m - 1) / m, False),
    "code": (lambda m: 4.0 * (m - 1) / m, True),
}


def require_constant(name: object) -> None:
    if not isinstance(name, str) or name not in CONSTANTS:
        raise InputError(f"constant to be one of {', '.join(CONSTANTS)}", repr(name), "choose one of them")


@dataclass(frozen=True, eq=False)
class LevelTables:
    """Components of the level below (devices at the lowest), joined as `link` says.

    A table is asked for with `ahead`: how many mini-batches its whole pipeline must keep in flight for each that the
    pipeline alone would, because others follow it.
    """

    ideals: Ideals
    link: Level
    under: LevelTables | None
    seconds: FloatArray  # of every pair of states
    fits: LongArray | None  # most mini-batches in flight that the memory of a device allows for a pair; None: any
    constant: str
    inputs_of: dict[int, Inputs] = field(default_factory=dict)  # by `ahead`: the lower levels are worked out once

    @cached_property
    def rates(self) -> FloatArray:
        factor, _ = CONSTANTS[self.constant]
        return np.array([0.0] + [factor(m) / self.link.reduce_rate(m) for m in range(1, self.link.size + 1)])

    def depth(self, ahead: int) -> LongArray:
        """Return [m, m']: mini-batches in flight on the last m' of the first m components."""
        n = self.link.size
        depth = np.ones((n + 1, n + 1), dtype=np.int64)
        if self.fits is not None:
            for m in range(1, n + 1):
                for last in range(1, m + 1):
                    depth[m, last] = -(-(ahead * n - (m - last)) // last)
        return depth

    def inputs(self, ahead: int) -> Inputs:
        if ahead not in self.inputs_of:
            self.inputs_of[ahead] = self._inputs(ahead)
        return self.inputs_of[ahead]

    def _inputs(self, ahead: int) -> Inputs:
        n, depth = len(self.ideals), self.depth(ahead)
        which = np.zeros(int(depth.max()) + 1, dtype=np.int64)
        if self.under is None:
            most = np.full((n, n), UNBOUNDED, dtype=np.int64) if self.fits is None else self.fits
            return self.seconds[None], which, most
        used = np.unique(depth)
        which[used] = np.arange(len(used))
        base = np.stack([self.under.whole(int(d)) for d in used])
        return base, which, np.full((n, n), UNBOUNDED, dtype=np.int64)

    def table(self, start: int, ahead: int, tables: int = 1) -> Table:
        """Return the kernel's tables for all that begins at a state; `tables` is how many are asked for in all."""
        ideals, width = self.ideals, self.link.size + 1
        best = np.full((len(ideals), width), np.inf)
        split, taken = np.zeros((2, len(ideals), width), dtype=np.int64)
        from_state(
            tables * len(ideals) ** 2 * self.link.size**2 // 50,  # 50 inner steps cost about one simulated row
            *(start, ideals.below, *self.inputs(ahead), self.depth(ahead)),
            *(ideals.parameters, self.rates, CONSTANTS[self.constant][1], 2 * ideals.cut / self.link.bandwidth),
            *(best, split, taken),
        )  # fmt: skip
        return best, split, taken

    def whole(self, ahead: int) -> FloatArray:
        """Return A(i->j, all components) for every pair of states."""
        states = len(self.ideals)
        return np.stack([self.table(i, ahead, tables=states)[0][:, -1] for i in range(states)])
