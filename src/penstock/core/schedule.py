"""The Schedule: for each slot, an ordered list of actions, stored in arrays so that ten million fit into memory.

Builders create compute rows; `lower` adds transfers, reductions and updates. Both schedules are of this type, which the
checker, the simulator, the engine and the reports read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.action import COMPUTE, Action, Op
from penstock.core.arguments import named_fields
from penstock.core.shape import IntArray, Shape
from penstock.core.validation import from_json_of, require_noun, truth
from penstock.errors import InputError

OpArray = npt.NDArray[np.uint8]
LongArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ScheduleRows:
    """Columns of a schedule, with one entry per action."""

    op: OpArray
    stage: IntArray
    microbatch: IntArray
    version: IntArray
    peer: IntArray  # stage at the other end of a transfer, else -1
    replica: IntArray  # its replica, else -1

    def __len__(self) -> int:
        return len(self.op)

    @classmethod
    def compute(
        cls, op: npt.ArrayLike, stage: npt.ArrayLike, microbatch: npt.ArrayLike, version: npt.ArrayLike
    ) -> ScheduleRows:
        """Return rows without transfers, whose columns `peer` and `replica` use no memory."""
        ops = np.asarray(op, dtype=np.uint8)
        none = np.broadcast_to(np.int32(-1), ops.shape)
        at, k, v = (np.asarray(column, dtype=np.int32) for column in (stage, microbatch, version))
        return cls(ops, at, k, v, none, none)

    @classmethod
    def of_actions(cls, actions: Iterable[Action]) -> ScheduleRows:
        flat = [part for action in actions for part in _flatten(action)]
        table = np.array(
            [(a.op, a.stage, a.microbatch, a.version, a.peer, a.replica) for a in flat], dtype=np.int32
        ).reshape(-1, 6)
        op, stage, microbatch, version, peer, replica = table.T.copy()
        return cls(op.astype(np.uint8), stage, microbatch, version, peer, replica)

    def columns(self) -> tuple[OpArray, IntArray, IntArray, IntArray, IntArray, IntArray]:
        return self.op, self.stage, self.microbatch, self.version, self.peer, self.replica

    def take(self, index: Any) -> ScheduleRows:
        """Return the rows that a slice, mask or index array selects."""
        return ScheduleRows(*(column[index] for column in self.columns()))

    def same_as(self, other: ScheduleRows) -> bool:
        ours: tuple[np.ndarray, ...] = self.columns()
        theirs: tuple[np.ndarray, ...] = other.columns()
        return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


FREE_ENTRIES = 1 << 20  # entries of a table that any schedule may have


def _require_enough_rows(shape: Shape, rows: int) -> None:
    """Raise InputError for far more micro-batches than there are actions: `check` has tables of micro-batches."""
    entries = int(shape.stage_replicas.sum()) * shape.total
    if entries > FREE_ENTRIES + 16 * rows:
        raise InputError(
            f"{entries} forwards, as {shape.stages} stages and {shape.total} micro-batches have",
            f"{rows} actions in all",
            "correct microbatches and batches, or add the actions",
        )


def _flatten(action: Action) -> tuple[Action, ...]:
    return (action,) if action.joined is None else (action, action.joined)


@named_fields
@dataclass(frozen=True, eq=False)
class Schedule:
    """Actions of every slot in order: those of slot s are rows starts[s] to starts[s + 1] - 1."""

    shape: Shape
    rows: ScheduleRows
    starts: LongArray
    lowered: bool = False

    @classmethod
    def of_slots(cls, shape: Shape, slots: Sequence[Sequence[Action]], lowered: bool = False) -> Schedule:
        if len(slots) != shape.slots:
            raise InputError(f"one list of actions for each of {shape.slots} slots", len(slots), "give one a slot")
        rows = ScheduleRows.of_actions(action for slot in slots for action in slot)
        _require_enough_rows(shape, len(rows))
        lengths = [sum(len(_flatten(action)) for action in slot) for slot in slots]
        return cls(shape, rows, np.concatenate(([0], np.cumsum(lengths))).astype(np.int64), lowered)

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            self.shape == other.shape
            and self.lowered == other.lowered
            and np.array_equal(self.starts, other.starts)
            and self.rows.same_as(other.rows)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays inside: compare, do not hash

    def slot_of_rows(self) -> IntArray:
        """Return the slot of every row."""
        return np.repeat(np.arange(self.shape.slots, dtype=np.int32), np.diff(self.starts))

    def is_compute(self) -> BoolArray:
        """Return the mask of rows that are compute actions, not transfers, reductions or updates."""
        return np.isin(self.rows.op, [int(op) for op in COMPUTE])

    def action(self, row: int) -> Action:
        """Return the action of one row; that of an overlapped forward includes its backward."""
        op, stage, microbatch, version, peer, replica = (int(column[row]) for column in self.rows.columns())
        joined = self.action(row + 1) if op == Op.FB and self._overlaps(row) else None
        return Action(Op(op), stage, microbatch, version, peer, replica, joined)

    def _overlaps(self, row: int) -> bool:
        """Return True if the full backward of an F&B is the next row of the same slot."""
        following = row + 1
        same_slot = self.starts[np.searchsorted(self.starts, following)] != following
        return bool(same_slot and self.rows.op[following] == Op.B)

    def actions(self, slot: int) -> Iterator[Action]:
        """Yield the actions of one slot in order."""
        row, end = int(self.starts[slot]), int(self.starts[slot + 1])
        while row < end:
            action = self.action(row)
            yield action
            row += len(_flatten(action))

    def words(self) -> list[list[str]]:
        """Return the grid: one list of words per slot."""
        return [[str(action) for action in self.actions(slot)] for slot in range(self.shape.slots)]

    def __str__(self) -> str:
        return "\n".join(",".join(words) for words in self.words())

    def to_json(self) -> dict[str, Any]:
        return {"schedule": self.shape.to_json(), "lowered": self.lowered, "slots": self.words()}

    @classmethod
    @from_json_of("schedule")
    def from_json(cls, data: dict[str, Any]) -> Schedule:
        slots = [[Action.parse(word) for word in words] for words in data["slots"]]
        return cls.of_slots(Shape.from_json(data["schedule"]), slots, truth("lowered", data["lowered"]))


def require_schedule(value: object) -> None:
    """Refuse what is no schedule: its name, the path of its file, or a loop."""
    do = "make one: penstock.schedule(name, stages=..., microbatches=...), or penstock.from_csv(text)"
    require_noun(value, Schedule, "give loop.unroll(batches)" if hasattr(value, "unroll") else do)
