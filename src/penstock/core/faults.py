"""Faults that `check` reports, each with its place in the printed grid."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.core.arguments import named_fields
from penstock.core.schedule import Schedule

MOST_PRINTED = 20  # faults that a message shows; the others are counted
CONTEXT_WORDS = 4  # words shown on either side of a fault


class FaultKind(StrEnum):
    STRAY = "stray"  # no such stage, micro-batch, edge or replica, or not on this rank
    MISSING = "missing"
    DOUBLED = "doubled"
    ORDER = "order"  # backward before forward, weight before input gradient, receive after use, ...
    PARTNER = "partner"  # a transfer without its other end
    VERSION = "version"  # a weight version that does not exist, or is not the one that the method's law names
    UPDATE = "update"  # a reduction or update missing, too early or out of order
    DEADLOCK = "deadlock"
    CHANNEL = "channel"  # receives in another order than the sends, where transfers are in order
    MEMORY = "memory"


@named_fields
@dataclass(frozen=True)
class Fault:
    """One broken law. `cell` is the index in the slot's printed line, -1 for something that is missing."""

    kind: FaultKind
    slot: int
    cell: int
    message: str

    def __str__(self) -> str:
        return self.message


@named_fields
@dataclass(frozen=True)
class Report:
    """All faults of one schedule; it is sound if there are none."""

    schedule: Schedule
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        faults = [{"kind": f.kind.value, "slot": f.slot, "cell": f.cell, "message": f.message} for f in self.faults]
        return {"sound": self.ok, "faults": faults}

    def __str__(self) -> str:
        if self.ok:
            return "sound: every law holds"
        count = f"{len(self.faults)} fault{'s' if len(self.faults) > 1 else ''}"
        lines = [f"{count} in schedule {self.schedule.shape.name!r}"]
        for number, fault in enumerate(self.faults[:MOST_PRINTED], 1):
            lines.append(f"{number:3}. {_place(self.schedule, fault.slot)}: {fault.message}")
            lines += _excerpt(self.schedule, fault)
        if len(self.faults) > MOST_PRINTED:
            lines.append(f"     and {len(self.faults) - MOST_PRINTED} more")
        return "\n".join(lines)


def _place(schedule: Schedule, slot: int) -> str:
    rank, replica = int(schedule.shape.slot_rank[slot]), int(schedule.shape.slot_replica[slot])
    return f"rank {rank}" + (f" replica {replica}" if schedule.shape.replicas[rank] > 1 else "")


def _excerpt(schedule: Schedule, fault: Fault) -> list[str]:
    """Return the words around a fault, and a line that marks the faulty one."""
    if fault.cell < 0:
        return []
    words = [str(action) for action in schedule.actions(fault.slot)]
    first, last = max(0, fault.cell - CONTEXT_WORDS), min(len(words), fault.cell + CONTEXT_WORDS + 1)
    lead = "     " + ("… " if first else "")
    before = "".join(word + " " for word in words[first : fault.cell])
    line = lead + " ".join(words[first:last]) + (" …" if last < len(words) else "")
    return [line, " " * (len(lead) + len(before)) + "^" * len(words[fault.cell])]
