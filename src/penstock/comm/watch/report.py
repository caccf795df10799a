"""Failure reports: why the run has to end, and which rank waits for which when a rank has waited for too long.

The rank that detects a failure passes it on to all others as plain text. A report on waiting ranks has a line for each
rank, and names the rank at the end of the chain of waits.
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

from penstock.comm.watch.status import EVERYBODY, PageField, RankState, StatusPageReader

LIMIT = 48_000  # bytes of an encoded failure for which a status page has room


@dataclass(frozen=True)
class Failure:
    """A failure that ends the run. `rank` is the one at fault; `line` is the message on every rank; `silent` are ranks
    without heartbeat.

    `mendable`: an exception that the scripts may catch on all ranks, to build another pipeline. `renewal`: how often
    the ranks had rejoined before the failure.
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
        values = json.loads(data)
        silent = tuple(int(rank) for rank in values["silent"])
        return Failure(
            int(values["rank"]), str(values["line"]), silent, bool(values["mendable"]), int(values["renewal"])
        )


def full_traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it, with the calls above the frame that caught the exception."""
    formatted = traceback.TracebackException.from_exception(error)
    frames = _above(error.__traceback__)
    formatted.stack = traceback.StackSummary.from_list([*frames, *formatted.stack])
    return "".join(formatted.format())


def leave_for_torchrun(error: BaseException) -> None:
    """Record the error for torchrun, which otherwise reports the rank that happens to end first as the cause."""
    if isinstance(error, Exception) and os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        trace = error.__traceback__
        try:
            raise error  # it records the exception that is being handled
        except Exception:
            get_error_handler().record_exception(error)
        finally:
            error.__traceback__ = trace


def one_line(error: BaseException) -> str:
    """Return the last line of the exception's traceback, shortened."""
    text = "".join(traceback.format_exception_only(error)).strip()
    text = re.sub(r"\[/\S+\.cc:\d+\] ", "", text).split(" This is typically caused")[0]  # gloo's additions
    first, *rest = text.split("\n")
    return first + (" ..." if rest else "")


def _above(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    if trace is None or trace.tb_frame.f_back is None:
        return []
    return list(traceback.extract_stack(trace.tb_frame.f_back))


SILENT = 2.0  # seconds without a heartbeat, which comes five times a second
FRESH = 1_000_000_000  # a wait that was checked within this time (ns) before the last heartbeat is still going on


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank. `row` as text ("" between steps); ages in seconds; `peer` is None where it does not
    wait."""

    state: RankState
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
        return self.state in (RankState.STARTING, RankState.RUNNING) and self.beat_age > SILENT

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes, age: float) -> RankStatus:
        """Decode a status that was published `age` seconds ago."""
        status = RankStatus(**json.loads(data))
        return replace(
            status,
            state=RankState(status.state),
            row_age=status.row_age + age,
            waited=status.waited + age,
            beat_age=status.beat_age + age,
        )

    def describe(self, rank: int) -> str:
        """Return one line, without a line break."""
        doing = f"in {self.row} for {self.row_age:.1f} s" if self.row else self.place or "between two steps"
        if self.state == RankState.STARTING:
            doing = "starting"
        if self.state == RankState.DONE:
            return f"rank {rank}: has ended"
        if self.silent:
            cause = "is stopped (SIGSTOP)" if self.stopped else "is stopped, or stuck in native code"
            return f"rank {rank}: {doing}; has sent no heartbeat for {self.beat_age:.1f} s: {cause}"
        if self.peer is None:
            return f"rank {rank}: {doing}; computes, waits for no rank"
        whom = f"all ranks in collective {self.collectives}" if self.peer == EVERYBODY else f"rank {self.peer}"
        return f"rank {rank}: {doing}; waits for {whom} for {self.waited:.1f} s"


def rank_status(page: StatusPageReader, pid: int) -> RankStatus:
    """Read the status of a rank of this host from its page."""
    now, beat, checked = monotonic_ns(), page[PageField.BEAT], page[PageField.WAIT_SEEN]
    waits = checked > 0 and beat - checked < FRESH
    return RankStatus(
        page.state,
        page.row,
        (now - page[PageField.ROW_SINCE]) / 1e9,
        page[PageField.PEER] if waits else None,
        (now - page[PageField.WAIT_SINCE]) / 1e9 if waits else 0.0,
        (now - beat) / 1e9,
        page[PageField.COLLECTIVES],
        _stopped(pid),
        page.stack(),
        page.place,
    )


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def timeout_failure(rank: int, peer: int, waited: float, statuses: dict[int, RankStatus]) -> Failure:
    """Return the failure of a rank that has waited for too long, as one line for every rank."""
    chain = _chain(rank, statuses)
    last, silent = chain[-1], tuple(r for r, status in sorted(statuses.items()) if status.silent)
    links = ", ".join(f"rank {a} waits for rank {b}" for a, b in pairwise(chain))
    target = "all ranks" if peer == EVERYBODY else f"rank {peer}"
    cause = statuses[last].describe(last) if last in statuses else f"rank {last}: its status is unknown"
    if len(set(chain)) < len(chain):
        cause = "they wait for each other"
    head = f"rank {rank} has waited {waited:.1f} s for {target}, longer than the time-out"
    return Failure(last, f"{head}: {links + '; ' if links else ''}{cause}", silent)


def status_table(statuses: dict[int, RankStatus], own_stack: str, rank: int) -> str:
    """Return the status of every rank, and the Python stacks of those that can still report one."""
    lines = ["what each rank is doing:", *(f"  {status.describe(r)}" for r, status in sorted(statuses.items()))]
    stacks = {
        r: status.stack for r, status in sorted(statuses.items()) if status.stack and r != rank and not status.silent
    }
    for r, stack in {rank: own_stack, **stacks}.items():
        lines += [f"the main thread of rank {r} (innermost call last):", stack.rstrip("\n")]
    return "\n".join(lines) + "\n"


def _chain(rank: int, statuses: dict[int, RankStatus]) -> list[int]:
    """Return the ranks from `rank` along their waits, to one that does not wait or that is in the chain already."""
    chain = [rank]
    while len(chain) == len(set(chain)) and chain[-1] in statuses:
        status = statuses[chain[-1]]
        if status.peer is None or status.silent or status.state in (RankState.DONE, RankState.FAILED):
            break
        chain.append(status.peer if status.peer != EVERYBODY else _late(chain[-1], statuses))
        if chain[-1] == chain[-2]:
            return chain[:-1]
    return chain


def _late(rank: int, statuses: dict[int, RankStatus]) -> int:
    """Return the rank that a collective waits for: the one in the fewest collectives, ranks without heartbeat before
    others."""
    return min(statuses, key=lambda r: (not statuses[r].silent, statuses[r].collectives, r == rank, r))
