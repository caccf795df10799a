"""What one rank looks like to another at a moment: the lines of a report on who waits for whom."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic_ns

from penstock.engine.watch.board import EVERYBODY, Page, Slot, State

SILENT = 2.0  # seconds without a heartbeat, which comes five times a second
FRESH = 1_000_000_000  # a wait that was looked at within this time (ns) before the last heartbeat is still on


@dataclass(frozen=True)
class Sight:
    """`row` in words ("" between steps); ages in seconds; `peer` is None where it does not wait."""

    state: State
    row: str
    row_age: float
    peer: int | None
    waited: float
    beat_age: float
    collectives: int
    stopped: bool = False
    stack: str = ""
    place: str = ""  # as the end of a sentence

    @property
    def silent(self) -> bool:
        return self.state in (State.STARTING, State.RUNNING) and self.beat_age > SILENT

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes, age: float) -> Sight:
        """One that came by the store, `age` seconds ago."""
        sight = Sight(**json.loads(data))
        return replace(
            sight,
            state=State(sight.state),
            row_age=sight.row_age + age,
            waited=sight.waited + age,
            beat_age=sight.beat_age + age,
        )

    def describe(self, rank: int) -> str:
        """One line, without its end."""
        doing = f"in {self.row} for {self.row_age:.1f} s" if self.row else self.place or "between two steps"
        if self.state == State.STARTING:
            doing = "starting"
        if self.state == State.DONE:
            return f"rank {rank}: has ended"
        if self.silent:
            why = "is stopped (SIGSTOP)" if self.stopped else "is stopped, or stuck in native code"
            return f"rank {rank}: {doing}; gives no sign of life for {self.beat_age:.1f} s: {why}"
        if self.peer is None:
            return f"rank {rank}: {doing}; at work, waits for nobody"
        whom = f"all ranks in collective {self.collectives}" if self.peer == EVERYBODY else f"rank {self.peer}"
        return f"rank {rank}: {doing}; waits for {whom} for {self.waited:.1f} s"


def look(page: Page, pid: int) -> Sight:
    """At a rank of this host."""
    now, beat, seen = monotonic_ns(), page[Slot.BEAT], page[Slot.WAIT_SEEN]
    waits = seen > 0 and beat - seen < FRESH
    return Sight(
        page.state,
        page.row,
        (now - page[Slot.ROW_SINCE]) / 1e9,
        page[Slot.PEER] if waits else None,
        (now - page[Slot.WAIT_SINCE]) / 1e9 if waits else 0.0,
        (now - beat) / 1e9,
        page[Slot.COLLECTIVES],
        _stopped(pid),
        page.stack(),
        page.place,
    )


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
