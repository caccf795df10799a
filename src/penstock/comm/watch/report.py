"""Failure reports: why the run has to end, and who waits for whom when a rank has waited for too long.

A failure is found by one rank and passed on to all others as plain text. A report on waiting ranks has a line for each
rank, and names the one that all the waiting leads to.
"""

from __future__ import annotations

import json
import os
import re
import traceback
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import monotonic_ns
from types import TracebackType

from penstock.comm.watch.status import EVERYBODY, Page, Slot, State

LIMIT = 48_000  # bytes of a told failure: what a board has room for


@dataclass(frozen=True)
class Failure:
    """`rank` is the one at fault; `line` is one line for every rank; `silent` are ranks that give no sign of life.

    `mendable`: an exception, which the scripts may catch on all ranks, to make another pipeline. `renewal`: in the run
    as it was joined anew for that pipeline; 0 at first.
    """

    rank: int
    line: str
    silent: tuple[int, ...] = ()
    mendable: bool = False
    renewal: int = 0

    def encode(self) -> bytes:
        short = self.line if len(self.line) < LIMIT // 8 else self.line[: LIMIT // 8] + " ..."
        return json.dumps(asdict(self) | {"line": short}).encode()

    @staticmethod
    def decode(data: bytes) -> Failure:
        told = json.loads(data)
        silent = tuple(int(rank) for rank in told["silent"])
        return Failure(int(told["rank"]), str(told["line"]), silent, bool(told["mendable"]), int(told["renewal"]))


def full_traceback(error: BaseException) -> str:
    """As Python prints it, with the calls above the place that caught it, which are still under way."""
    drawn = traceback.TracebackException.from_exception(error)
    frames = _above(error.__traceback__)
    drawn.stack = traceback.StackSummary.from_list([*frames, *drawn.stack])
    return "".join(drawn.format())


def leave_for_torchrun(error: BaseException) -> None:
    """Else it names the rank that happened to end first as the cause."""
    if isinstance(error, Exception) and os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        trace = error.__traceback__
        try:
            raise error  # it writes down what is being handled
        except Exception:
            get_error_handler().record_exception(error)
        finally:
            error.__traceback__ = trace


def one_line(error: BaseException) -> str:
    """The exception as its traceback's last line, shortened."""
    text = "".join(traceback.format_exception_only(error)).strip()
    text = re.sub(r"\[/\S+\.cc:\d+\] ", "", text).split(" This is typically caused")[0]  # gloo's asides
    first, *rest = text.split("\n")
    return first + (" ..." if rest else "")


def _above(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    if trace is None or trace.tb_frame.f_back is None:
        return []
    return list(traceback.extract_stack(trace.tb_frame.f_back))


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


def blame(rank: int, peer: int, waited: float, sights: dict[int, Sight]) -> Failure:
    """One line, for every rank."""
    chain = _chain(rank, sights)
    last, silent = chain[-1], tuple(r for r, sight in sorted(sights.items()) if sight.silent)
    way = ", ".join(f"rank {a} waits for rank {b}" for a, b in pairwise(chain))
    whom = "all ranks" if peer == EVERYBODY else f"rank {peer}"
    cause = sights[last].describe(last) if last in sights else f"rank {last}: nothing is known of it"
    if len(set(chain)) < len(chain):
        cause = "they wait for each other"
    head = f"rank {rank} has waited {waited:.1f} s for {whom}, longer than the time-out"
    return Failure(last, f"{head}: {way + '; ' if way else ''}{cause}", silent)


def table(sights: dict[int, Sight], own_stack: str, rank: int) -> str:
    """What every rank is doing, and where in their Python code those are that can still say so."""
    lines = ["what each rank is doing:", *(f"  {sight.describe(r)}" for r, sight in sorted(sights.items()))]
    stacks = {r: sight.stack for r, sight in sorted(sights.items()) if sight.stack and r != rank and not sight.silent}
    for r, stack in {rank: own_stack, **stacks}.items():
        lines += [f"the main thread of rank {r} (innermost call last):", stack.rstrip("\n")]
    return "\n".join(lines) + "\n"


def _chain(rank: int, sights: dict[int, Sight]) -> list[int]:
    """From rank to rank along who waits for whom, to one that does not wait, or to one that was there already."""
    chain = [rank]
    while len(chain) == len(set(chain)) and chain[-1] in sights:
        sight = sights[chain[-1]]
        if sight.peer is None or sight.silent or sight.state in (State.DONE, State.FAILED):
            break
        chain.append(sight.peer if sight.peer != EVERYBODY else _late(chain[-1], sights))
        if chain[-1] == chain[-2]:
            return chain[:-1]
    return chain


def _late(rank: int, sights: dict[int, Sight]) -> int:
    """Whom a collective waits for: the rank that has come to the fewest, a silent one before others."""
    return min(sights, key=lambda r: (not sights[r].silent, sights[r].collectives, r == rank, r))
