"""The watch of a rank: it reads the status of the others, learns of their failures at once, and ends this rank in time.

An exception is reported by the rank that raises it, with a traceback; a death, in one line, by the ranks of its host
that notice it first. Every other rank stops with one line: in its main thread by a RankError where it checks for
failures, else by its monitor, which waits for a limited time.
"""

from __future__ import annotations

import os
import signal
import threading
from time import monotonic, sleep

from torch._C._distributed_c10d import Store

from penstock.comm.transport.interface import ClosedLane
from penstock.comm.watch.monitor import Monitor, WaitClock
from penstock.comm.watch.process import Parent
from penstock.comm.watch.report import (
    Failure,
    RankStatus,
    full_traceback,
    leave_for_torchrun,
    one_line,
    rank_status,
    status_table,
    timeout_failure,
)
from penstock.comm.watch.status import (
    EVERYBODY,
    GATHER,
    VARIABLE,
    PageField,
    RankState,
    StatusPage,
    StatusPageReader,
    beyond,
    kind_of,
)
from penstock.comm.watch.stderr import flush, main_stack, write_stderr
from penstock.comm.watch.store import HASTE, LINGER, StatusExchange
from penstock.errors import LeftAlone, PenstockError, RankError

GRACE = 3.0  # seconds within which the main thread has to raise a failure
LAST = 4.0  # seconds within which it has to end then
NEWS = 1.0  # seconds to wait for the cause of a broken connection
FIRST = 0.7  # seconds to wait for the rank at fault to end first
AGENT = 0.25  # seconds within which torchrun notices that
FAR_NEWS = 2.2  # the same as NEWS with ranks on other hosts
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun in the environment


SAME = "every rank has to leave, evaluate, save and switch at the same record"


TOGETHER = "every rank has to make the same pipelines, and the same calls to each"


def _left(rank: int) -> str:
    return f"rank {rank} has left its training loop, or evaluates, saves or switches in it"


def _kind(kind: int) -> str:
    return "a gather" if kind == GATHER else f"a broadcast from rank {kind - 1}"


class Watch:
    """The watch of this process. `timeout`: seconds that one rank may wait for another."""

    def __init__(self, rank: int, size: int, timeout: float = 120.0) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.status_page = StatusPage(os.environ.get(VARIABLE))
        self.doing, self.outside = self.status_page.doing, self.status_page.outside
        self.pages: dict[int, StatusPageReader] = {}  # of the other ranks of this host
        self.pids: dict[int, int] = {}
        self.failure: Failure | None = None
        self.renewal = 0  # how often the ranks have rejoined: earlier failures are over
        self.learned_at = 0.0
        self.leaving_at: float | None = None  # when an uncaught exception was noticed
        self.failure_known = threading.Event()
        self.raised = self.printed = self.ended = False
        self.code = 1  # exit code of this rank after a failure
        self.shown: BaseException | None = None  # the exception whose traceback has been printed
        self.lock = threading.RLock()
        self.wait_clock = WaitClock()
        self.done_since: dict[int, float] = {}
        self.monitor: Monitor | None = None
        self.exchange: StatusExchange | None = None

    # -- start and end ------------------------------------------------------------------------------------------------

    def start(self, near: dict[int, tuple[int, str]], store: Store, agent: bool, parent: Parent | None) -> None:
        """Start to watch. `near`: process and page of the other ranks of this host; `store`: a connection for the watch
        alone; `agent`: a launcher holds the store; `parent`: see Monitor."""
        self.pages = {rank: StatusPageReader(status_page) for rank, (_, status_page) in near.items()}
        self.pids = {rank: pid for rank, (pid, _) in near.items()}
        own = StatusPageReader(self.status_page.fd)
        far = tuple(r for r in range(self.size) if r != self.rank and r not in near)
        self.exchange = StatusExchange(
            store, self.rank, far, lambda: rank_status(own, os.getpid()), self.record_failure, agent
        )
        self.monitor = Monitor(self.status_page, self.pages, self.pids, self, parent)

    def running(self) -> None:
        """Record the end of the start: all ranks have connected, and opened each other's pages."""
        self.status_page.fields[PageField.STATE] = RankState.RUNNING
        self.status_page.file.unlink()

    def finished(self) -> None:
        """Record the normal end of this rank. Others that still wait for it raise an error."""
        if self.ended:
            return
        self.ended = True
        if self.failure is None:
            self.status_page.fields[PageField.STATE] = RankState.DONE
        if self.monitor is not None and self.exchange is not None:
            self.monitor.leave()
            self.exchange.leave(LINGER + 0.5)

    # -- calls of executors and transports ----------------------------------------------------------------------------

    def waiting(self, peer: int) -> None:
        """Record that this rank begins to wait for another (-1: for all, in a collective)."""
        self.check(peer, 0.0)

    def check(self, peer: int, waited: float) -> None:
        """Raise if some rank has failed, if `peer` has ended, or if `waited` seconds are too many."""
        now = monotonic()
        if threading.current_thread() is threading.main_thread():
            self.status_page.wait(peer, int((now - waited) * 1e9))
        if self.failure is None:
            self._check_ended(peer, now)
            self._check_left_run()
        if self.failure is None and peer == EVERYBODY:
            self._check_same_collective()
        if self.failure is None and self.wait_clock.running_seconds(now, waited) > self.timeout:
            self._time_out(peer, waited)
        if self.failure is not None:
            raise self._error(self.failure)

    def lost(self, peer: int, error: BaseException) -> Exception:
        """Return the error to raise after the connection to a rank broke; wait a moment for the cause to be
        reported."""
        until = monotonic() + (FAR_NEWS if self.exchange is not None and self.exchange.far else NEWS)
        while not self.failure_known.wait(0.05) and monotonic() < until:
            self._check_ended(peer, monotonic())
        if self.failure is None:
            self._report(
                self._closed_lane_failure(peer)
                if isinstance(error, ClosedLane)
                else self._lost_connection_failure(peer, error)
            )
        assert self.failure is not None
        return self._error(self.failure)

    def failed(self, error: BaseException) -> None:
        """Report the failure of this rank: print its traceback, then notify all other ranks."""
        self._await_cause(error)
        with self.lock:
            if self.failure is not None:
                return  # this error is a consequence of that failure
            line = f"rank {self.rank} {self._verb(error)}{self._place()}: {one_line(error)}"
            failure = Failure(self.rank, line, (), self._mendable(error), self.renewal)
            if error is not self.shown and not isinstance(error, KeyboardInterrupt):
                write_stderr(full_traceback(error))
            write_stderr(f"{failure.line}\n")
            self.shown, self.printed = error, True
            if isinstance(error, SystemExit) and isinstance(error.code, int):
                self.code = error.code & 0xFF or 1  # the user's exit code, but never 0
            self._report(failure)
        leave_for_torchrun(error)

    def uncaught(self) -> None:
        """Record that an exception ends this process, so that ranks that wait for it do not wait longer."""
        with self.lock:
            self.leaving_at = self.leaving_at or monotonic()
            if self.failure is not None and self.failure.mendable and self.failure.rank == self.rank and self.exchange:
                self.exchange.publish_failure(self.failure)

    # -- rejoining for another pipeline -------------------------------------------------------------------------------

    def is_over(self, rank: int) -> bool:
        """Whether a rank has ended, in whatever way."""
        return self._has_ended(rank) or (self.monitor is not None and rank in self.monitor.gone)

    def require_mendable(self) -> None:
        """Raise if the failure does not allow to build another pipeline."""
        if self.failure is not None and not self.failure.mendable:
            raise self._error(self.failure)

    def report_left_behind(self, rank: int) -> None:
        """Report that this rank builds another pipeline, while `rank` still waits in the last one."""
        line = f"rank {self.rank} has left its pipeline and makes another, but rank {rank} goes on with it: {TOGETHER}"
        self._report(Failure(self.rank, line, (), self._mendable(None), self.renewal))

    def forget_failures(self, renewal: int) -> None:
        """Forget earlier failures: all ranks are about to build another pipeline."""
        with self.lock:
            self.failure, self.renewal, self.shown, self.code = None, renewal, None, 1
            self.raised = self.printed = False
            self.done_since.clear()
            self.failure_known.clear()
        for rank in self.monitor.gone if self.monitor is not None else ():
            self.rank_died(rank)

    # -- callbacks of the monitor and the status exchange -------------------------------------------------------------

    def record_failure(self, failure: Failure) -> None:
        """Record a failure that this rank or another has detected, unless one is known or it belongs to an earlier
        run."""
        with self.lock:
            of_this_run = not failure.mendable or failure.renewal == self.renewal
            if self.failure is None and not self.ended and of_this_run:
                self.failure, self.learned_at = failure, monotonic()
                self.failure_known.set()
                if UNDER_TORCHRUN in os.environ:  # whose agent may end this rank before its main thread prints it
                    self.print_reason()

    def rank_failed(self, rank: int) -> None:
        self.record_failure(Failure.decode(self.pages[rank].report()))

    def rank_died(self, rank: int) -> None:
        self._read_failures()  # it may have ended because of a reported failure
        cause = "it was killed, crashed, possibly for lack of memory, or left by os._exit"
        self._report(Failure(rank, f"rank {rank} died {self.pages[rank].place} without reporting an error: {cause}"))

    def signal_unhandled(self, number: signal.Signals) -> None:
        line = f"rank {self.rank} was told to end ({number.name}){self._place()}"
        self._report(Failure(self.rank, line))
        self.end(128 + number)

    def end_if_overdue(self) -> None:
        """End this process if the main thread has not ended in time after a failure."""
        failure, since = self.failure, self.learned_at
        if failure is None:
            return
        if failure.mendable:  # the scripts may have caught the exception, and go on
            if self.leaving_at is None and self.monitor is not None and failure.rank in self.monitor.gone:
                self.leaving_at = monotonic()
            if self.leaving_at is None:
                return
            since = max(since, self.leaving_at)
        if monotonic() - since > (LAST if self.raised else GRACE):
            self.end(1)

    def print_reason(self, where: str = "") -> None:
        """Print why this rank stops, once."""
        if self.failure is not None and not self.printed:
            self.printed = True
            write_stderr(f"rank {self.rank} stops{where}: {self.failure.line}\n")

    def end(self, code: int) -> None:
        """End the process now, from any thread, even if other threads are stuck."""
        self.print_reason(self._place())
        self.kill_silent_ranks()
        if self.exchange is not None:
            self.exchange.leave(HASTE + 0.3)
        flush()
        self.let_cause_end_first()
        os._exit(code)

    def let_cause_end_first(self) -> None:
        """Under torchrun, wait for the rank at fault to end first: torchrun reports that one as the cause."""
        fault = -1 if self.failure is None else self.failure.rank
        if UNDER_TORCHRUN in os.environ and self.monitor is not None and self.monitor.processes.await_end(fault, FIRST):
            sleep(AGENT)
            if self.failure is not None and fault != self.rank:  # the agent saw a normal exit code of that rank
                leave_for_torchrun(RankError(self.failure.line, fault))

    def kill_silent_ranks(self) -> None:
        """Kill the ranks of this host that are stopped or stuck, as they cannot end themselves."""
        if self.failure is not None and self.monitor is not None:
            for rank in self.failure.silent:
                self.monitor.processes.kill(rank)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _report(self, failure: Failure) -> None:
        """Report a failure detected here to all other ranks."""
        with self.lock:
            if self.failure is not None or self.ended:
                return
            self.record_failure(failure)
            self.status_page.publish_failure(failure.encode())
            if self.exchange is not None and not failure.mendable:
                self.exchange.publish_failure(failure)

    def _mendable(self, error: BaseException | None) -> bool:
        """Whether the ranks can rejoin afterwards. Ranks of several hosts have to be restarted instead."""
        one_host = self.exchange is not None and not self.exchange.far
        return one_host and (error is None or isinstance(error, Exception))

    def _error(self, failure: Failure) -> RankError:
        self.raised = True
        return RankError(failure.line, failure.rank)

    def _verb(self, error: BaseException) -> str:
        return "was interrupted" if isinstance(error, KeyboardInterrupt) else "failed"

    def _place(self) -> str:
        return f" in {self.status_page.row}" if self.status_page.row else ""

    def _await_cause(self, error: BaseException) -> None:
        """Wait for another rank's report where the error is likely a consequence of it: a broken connection, or an
        error on all ranks."""
        if isinstance(error, (RuntimeError, OSError)) and "onnection" in str(error):
            self.failure_known.wait(NEWS)
        elif isinstance(error, PenstockError) and self.rank:
            self.failure_known.wait(0.02 + 0.02 * min(self.rank, 20))  # the lowest rank reports it
        self._read_failures()

    def _read_failures(self) -> None:
        """Record failures on the pages of this host's ranks, without waiting for the monitor."""
        for rank, page in self.pages.items():
            if page[PageField.STATE] == RankState.FAILED:
                self.rank_failed(rank)

    def _check_ended(self, peer: int, now: float) -> None:
        """Report a peer that has ended while this rank waits for it. Its last message may still arrive for a moment."""
        for rank in range(self.size) if peer == EVERYBODY else (peer,):
            if rank != self.rank and self._has_ended(rank):
                since = self.done_since.setdefault(rank, now)
                if now - since > 0.4:
                    self._report(
                        Failure(rank, f"rank {rank} has ended, but rank {self.rank} waits for it{self._place()}")
                    )

    def _check_left_run(self) -> None:
        """Report a rank of this host that has left a run without a flush while another goes on. An exception may have
        ended its loop: then that rank reports it within a moment, and that is the cause."""
        own = self.status_page.fields
        for rank, page in self.pages.items():
            if beyond(page[PageField.FED], own[PageField.LEAVING]):
                raise LeftAlone(f"{_left(self.rank)}, but rank {rank} goes on: {SAME}", self.rank)
            if beyond(own[PageField.FED], page[PageField.LEAVING]) and not self.failure_known.wait(NEWS):
                self._report(Failure(rank, f"{_left(rank)}, but rank {self.rank} goes on: {SAME}"))

    def _check_same_collective(self) -> None:
        """Detect ranks of this host that wait in different collectives: called in different orders, they would wait
        forever. A rank that left its loop because of an exception reports that first."""
        number, own = self.status_page.fields[PageField.COLLECTIVES], self.status_page.fields
        for rank, page in self.pages.items():
            kinds = {self.rank: kind_of(own, number), rank: kind_of(page.fields, number)}
            (a, one), (b, other) = sorted(kinds.items())
            if one is None or other is None or one == other:
                continue
            mismatch = f"rank {a} has come to {_kind(one)} and rank {b} to {_kind(other)} as collective {number}"
            if own[PageField.LEAVING]:
                raise LeftAlone(f"{_left(self.rank)}, but rank {rank} goes on: {mismatch}; {SAME}", self.rank)
            away = f"{_left(rank)}, but rank {self.rank} goes on: " if page[PageField.LEAVING] else ""
            if not self.failure_known.wait(NEWS):
                self._report(Failure(rank, f"{away}{mismatch}; {SAME}"))

    def _has_ended(self, rank: int) -> bool:
        if rank in self.pages:
            return self.pages[rank][PageField.STATE] == RankState.DONE
        return self.exchange is not None and self.exchange.ended(rank)

    def _closed_lane_failure(self, peer: int) -> Failure:
        """Return the failure for a rank that has closed its lanes, as the end of its script does, though this one waits
        for it."""
        left = f"rank {peer} has left the pipeline (its script is over, or has closed it)"
        required = "every rank has to take as many batches, and to make the same calls"
        return Failure(peer, f"{left}, but rank {self.rank} waits for it{self._place()}: {required}")

    def _lost_connection_failure(self, peer: int, error: BaseException) -> Failure:
        """Return the failure for a broken connection without a reported cause: the host is lost, or its only rank was
        killed."""
        statuses = self.statuses()
        if peer == EVERYBODY:
            peer = max(statuses, key=lambda rank: statuses[rank].beat_age)
            target = f"another rank, most likely rank {peer}, last heard of {statuses[peer].beat_age:.1f} s ago"
        else:
            target = f"rank {peer}"
        last = f", last {statuses[peer].place}" if peer in statuses and statuses[peer].place else ""
        return Failure(peer, f"rank {self.rank} has lost its connection to {target}{last}: {one_line(error)}")

    def _time_out(self, peer: int, waited: float) -> None:
        self.failure_known.wait(0.1 * min(self.rank, 10))  # lower ranks report first: one report is enough
        self._read_failures()
        with self.lock:
            statuses = self.statuses()
            failure = timeout_failure(self.rank, peer, waited, statuses)
            if self.failure is None:
                self.printed = True
                write_stderr(f"{failure.line}\n{status_table(statuses, main_stack(), self.rank)}")
                self._report(failure)

    def statuses(self) -> dict[int, RankStatus]:
        """Return the current status of every rank."""
        own = rank_status(StatusPageReader(self.status_page.fd), os.getpid())
        near = {rank: rank_status(page, self.pids[rank]) for rank, page in self.pages.items()}
        far = self.exchange.statuses() if self.exchange is not None else {}
        return {self.rank: own, **near, **far}
