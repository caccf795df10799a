"""What the laws look at: the schedule handed in, its lowered form, and the tables made of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.action import Op
from penstock.core.faults import Fault, FaultKind
from penstock.core.laws.census import Census, census
from penstock.core.lower import lower
from penstock.core.match import Match, match
from penstock.core.schedule import Schedule

MORE = 1_000  # faults of one law that are looked at; a broken million says no more than a broken thousand


@dataclass(frozen=True, eq=False)
class Evidence:
    """One checking."""

    given: Schedule
    full: Schedule
    seen: Census
    pairs: Match

    @classmethod
    def of(cls, schedule: Schedule) -> Evidence:
        full = lower(schedule)
        return cls(schedule, full, census(full), match(full))

    def fault(self, kind: FaultKind, row: int, message: str) -> Fault:
        """A fault of one row of the lowered schedule, pointing into the grid that was handed in."""
        slot = int(np.searchsorted(self.full.starts, row, side="right")) - 1
        return Fault(kind, slot, self._cell(slot, row), f"{self.word(row)}: {message}")

    def word(self, row: int) -> str:
        return str(self.full.action(row))

    def _cell(self, slot: int, row: int) -> int:
        """Place of a row in the slot's line: its own, or that of the compute action it serves."""
        first, last = int(self.full.starts[slot]), int(self.full.starts[slot + 1])
        op = self.full.rows.op[first : row + 1]
        pairs = np.count_nonzero((op[:-1] == Op.FB) & (op[1:] == Op.B))  # an overlapped pair is two rows and one word
        if self.given.lowered:
            return int(len(op) - 1 - pairs)
        if not np.any(self.full.rows.op[first:last] <= Op.FB):
            return -1
        done = int(np.count_nonzero(op <= Op.FB) - pairs)
        serves_next = op[-1] in (Op.RECV_F, Op.RECV_B)
        return max(0, done - (0 if serves_next else 1))
