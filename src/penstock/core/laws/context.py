"""The context of a check: the schedule, its lowered form, and tables that several laws use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.action import Op
from penstock.core.faults import Fault, FaultKind
from penstock.core.laws.action_index import ActionIndex, index_actions
from penstock.core.lower import lower
from penstock.core.match import Match, match
from penstock.core.schedule import Schedule

MOST_FAULTS = 1_000  # faults of one kind that are reported


@dataclass(frozen=True, eq=False)
class CheckContext:
    """The checked schedule, its lowered form (`full`), the index of its actions, and its transfers paired."""

    schedule: Schedule
    full: Schedule
    index: ActionIndex
    pairs: Match

    @classmethod
    def of(cls, schedule: Schedule) -> CheckContext:
        full = lower(schedule)
        return cls(schedule, full, index_actions(full), match(full))

    def fault(self, kind: FaultKind, row: int, message: str) -> Fault:
        """Return a fault of one row of the lowered schedule, with its place in the grid of the checked schedule."""
        slot = int(np.searchsorted(self.full.starts, row, side="right")) - 1
        return Fault(kind, slot, self._cell(slot, row), f"{self.word(row)}: {message}")

    def word(self, row: int) -> str:
        return str(self.full.action(row))

    def _cell(self, slot: int, row: int) -> int:
        """Return a row's index in the slot's printed line: its own, or that of the compute action it belongs to."""
        first, last = int(self.full.starts[slot]), int(self.full.starts[slot + 1])
        op = self.full.rows.op[first : row + 1]
        pairs = np.count_nonzero((op[:-1] == Op.FB) & (op[1:] == Op.B))  # an overlapped pair is two rows and one word
        if self.schedule.lowered:
            return int(len(op) - 1 - pairs)
        if not np.any(self.full.rows.op[first:last] <= Op.FB):
            return -1
        done = int(np.count_nonzero(op <= Op.FB) - pairs)
        belongs_to_next = op[-1] in (Op.RECV_F, Op.RECV_B)
        return max(0, done - (0 if belongs_to_next else 1))
