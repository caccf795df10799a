"""The watch of a rank: it knows what the others do, learns of their failures at once, and ends this one in time.

A failure is told once, by the rank that found it: its traceback first. Every other rank stops with one line: in its
main thread, by a RankError, where that comes to ask; else by its monitor, which does not wait for ever.
"""

from __future__ import annotations

import os
import signal
import threading
from time import monotonic, sleep

from torch._C._distributed_c10d import Store

from penstock.comm.transport.interface import ClosedLane
from penstock.comm.watch.monitor import Monitor, Patience
from penstock.comm.watch.process import Parent
from penstock.comm.watch.report import Failure, Sight, blame, full_traceback, leave_for_torchrun, look, one_line, table
from penstock.comm.watch.status import EVERYBODY, GATHER, VARIABLE, Board, Page, Slot, State, beyond, kind_of
from penstock.comm.watch.stderr import flush, main_stack, say
from penstock.comm.watch.store import HASTE, LINGER, Courier
from penstock.errors import LeftAlone, PenstockError, RankError

GRACE = 3.0  # seconds in which the main thread has to come to a failure
LAST = 4.0  # seconds after which it has to have ended
NEWS = 1.0  # seconds that a broken connection waits for its cause
FIRST = 0.7  # seconds in which the rank at fault has to have ended
AGENT = 0.25  # seconds in which torchrun finds that
FAR_NEWS = 2.2  # the same where it may have to come from another host
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"  # in the environment


SAME = "every rank has to leave, evaluate, save and switch at the same record"


TOGETHER = "every rank has to make the same pipelines, and the same calls to each"


def _left(rank: int) -> str:
    return f"rank {rank} has left its training loop, or evaluates, saves or switches in it"


def _kind(kind: int) -> str:
    return "a gather" if kind == GATHER else f"a broadcast from rank {kind - 1}"


class Watch:
    """One a process. `timeout`: seconds that one rank may wait for another."""

    def __init__(self, rank: int, size: int, timeout: float = 120.0) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.board = Board(os.environ.get(VARIABLE))
        self.doing, self.outside = self.board.doing, self.board.outside
        self.pages: dict[int, Page] = {}  # of the other ranks of this host
        self.pids: dict[int, int] = {}
        self.failure: Failure | None = None
        self.renewal = 0  # of the run: failures of one before are over
        self.learned_at = 0.0
        self.leaving_at: float | None = None  # when an exception was found that nobody catches
        self.news = threading.Event()
        self.raised = self.printed = self.ended = False
        self.code = 1  # with which a rank of a run that failed ends
        self.shown: BaseException | None = None  # the exception whose traceback has been printed
        self.lock = threading.RLock()
        self.patience = Patience()
        self.done_since: dict[int, float] = {}
        self.monitor: Monitor | None = None
        self.courier: Courier | None = None

    # -- start and end ------------------------------------------------------------------------------------------------

    def start(self, near: dict[int, tuple[int, str]], store: Store, agent: bool, parent: Parent | None) -> None:
        """`near`: process and board of the other ranks of this host; `store`: a connection for the watch alone;
        `agent`: a launcher holds the store; `parent`: see Monitor."""
        self.pages = {rank: Page(board) for rank, (_, board) in near.items()}
        self.pids = {rank: pid for rank, (pid, _) in near.items()}
        own = Page(self.board.fd)
        far = tuple(r for r in range(self.size) if r != self.rank and r not in near)
        self.courier = Courier(store, self.rank, far, lambda: look(own, os.getpid()), self.learn, agent)
        self.monitor = Monitor(self.board, self.pages, self.pids, self, parent)

    def running(self) -> None:
        """The start is over: all have met, and opened each other's boards."""
        self.board.page[Slot.STATE] = State.RUNNING
        self.board.file.take_name()

    def finished(self) -> None:
        """The normal end of this rank. Others that still wait for it are told that it has ended."""
        if self.ended:
            return
        self.ended = True
        if self.failure is None:
            self.board.page[Slot.STATE] = State.DONE
        if self.monitor is not None and self.courier is not None:
            self.monitor.leave()
            self.courier.leave(LINGER + 0.5)

    # -- what the worker and the transports say and ask ---------------------------------------------------------------

    def waiting(self, peer: int) -> None:
        """This rank begins to wait for another (-1: for all, in a collective)."""
        self.check(peer, 0.0)

    def check(self, peer: int, waited: float) -> None:
        """Raise if some rank has failed, if `peer` has ended, or if `waited` seconds are too many."""
        now = monotonic()
        if threading.current_thread() is threading.main_thread():
            self.board.wait(peer, int((now - waited) * 1e9))
        if self.failure is None:
            self._check_ended(peer, now)
            self._check_together()
        if self.failure is None and peer == EVERYBODY:
            self._check_alike()
        if self.failure is None and self.patience.counted(now, waited) > self.timeout:
            self._time_out(peer, waited)
        if self.failure is not None:
            raise self._error(self.failure)

    def lost(self, peer: int, error: BaseException) -> Exception:
        """The connection to a rank broke: find out why, waiting a moment for news, and return what to raise."""
        until = monotonic() + (FAR_NEWS if self.courier is not None and self.courier.far else NEWS)
        while not self.news.wait(0.05) and monotonic() < until:
            self._check_ended(peer, monotonic())
        if self.failure is None:
            self._declare(self._parted(peer) if isinstance(error, ClosedLane) else self._unexplained(peer, error))
        assert self.failure is not None
        return self._error(self.failure)

    def failed(self, error: BaseException) -> None:
        """This rank has failed: print its traceback, then spread the word, at once."""
        self._await_cause(error)
        with self.lock:
            if self.failure is not None:
                return  # a consequence
            line = f"rank {self.rank} {self._how(error)}{self._place()}: {one_line(error)}"
            failure = Failure(self.rank, line, (), self._mendable(error), self.renewal)
            if error is not self.shown and not isinstance(error, KeyboardInterrupt):
                say(full_traceback(error))
            say(f"{failure.line}\n")
            self.shown, self.printed = error, True
            if isinstance(error, SystemExit) and isinstance(error.code, int):
                self.code = error.code & 0xFF or 1  # the user's own; but to leave amid a step is no success
            self._declare(failure)
        leave_for_torchrun(error)

    def uncaught(self) -> None:
        """An exception ends this process: whoever waits for it to go on learns that it will not."""
        with self.lock:
            self.leaving_at = self.leaving_at or monotonic()
            if self.failure is not None and self.failure.mendable and self.failure.rank == self.rank and self.courier:
                self.courier.tell(self.failure)

    # -- another pipeline ---------------------------------------------------------------------------------------------

    def is_over(self, rank: int) -> bool:
        """Whether a rank has ended, in whatever way."""
        return self._has_ended(rank) or (self.monitor is not None and rank in self.monitor.gone)

    def require_hope(self) -> None:
        """Raise if what has failed cannot be mended."""
        if self.failure is not None and not self.failure.mendable:
            raise self._error(self.failure)

    def left_behind(self, rank: int) -> None:
        """This rank makes another pipeline, where that one still goes on with the last."""
        line = f"rank {self.rank} has left its pipeline and makes another, but rank {rank} goes on with it: {TOGETHER}"
        self._declare(Failure(self.rank, line, (), self._mendable(None), self.renewal))

    def renew(self, renewal: int) -> None:
        """All ranks have come to make another pipeline: what has failed before is over."""
        with self.lock:
            self.failure, self.renewal, self.shown, self.code = None, renewal, None, 1
            self.raised = self.printed = False
            self.done_since.clear()
            self.news.clear()
        for rank in self.monitor.gone if self.monitor is not None else ():
            self.died(rank)

    # -- what the monitor and the courier tell ------------------------------------------------------------------------

    def learn(self, failure: Failure) -> None:
        """Another rank, or this one, has found that the run has to end."""
        with self.lock:
            of_this_run = not failure.mendable or failure.renewal == self.renewal
            if self.failure is None and not self.ended and of_this_run:
                self.failure, self.learned_at = failure, monotonic()
                self.news.set()
                if UNDER_TORCHRUN in os.environ:  # whose agent may end this rank before its main thread comes to it
                    self.say_why()

    def told(self, rank: int) -> None:
        self.learn(Failure.decode(self.pages[rank].report()))

    def died(self, rank: int) -> None:
        self._hear()  # its death may be a consequence
        cause = "it was killed, crashed, possibly for lack of memory, or left by os._exit"
        self._declare(Failure(rank, f"rank {rank} died {self.pages[rank].place} without a word: {cause}"))

    def stuck(self, number: signal.Signals) -> None:
        line = f"rank {self.rank} was told to end ({number.name}){self._place()}"
        self._declare(Failure(self.rank, line))
        self.end(128 + number)

    def overdue(self) -> None:
        """The main thread has had its time to end."""
        failure, since = self.failure, self.learned_at
        if failure is None:
            return
        if failure.mendable:  # the scripts may have caught it, and go on
            if self.leaving_at is None and self.monitor is not None and failure.rank in self.monitor.gone:
                self.leaving_at = monotonic()
            if self.leaving_at is None:
                return
            since = max(since, self.leaving_at)
        if monotonic() - since > (LAST if self.raised else GRACE):
            self.end(1)

    def say_why(self, where: str = "") -> None:
        """Why this rank stops, once."""
        if self.failure is not None and not self.printed:
            self.printed = True
            say(f"rank {self.rank} stops{where}: {self.failure.line}\n")

    def end(self, code: int) -> None:
        """Leave now, from any thread, whatever the others are stuck in."""
        self.say_why(self._place())
        self.leave_no_silent()
        if self.courier is not None:
            self.courier.leave(HASTE + 0.3)
        flush()
        self.after_the_first()
        os._exit(code)

    def after_the_first(self) -> None:
        """Under torchrun, which takes the rank that it finds ended first for the cause: let the one at fault be it."""
        fault = -1 if self.failure is None else self.failure.rank
        if UNDER_TORCHRUN in os.environ and self.monitor is not None and self.monitor.processes.await_end(fault, FIRST):
            sleep(AGENT)
            if self.failure is not None and fault != self.rank:  # to the agent, its end was as it should be
                leave_for_torchrun(RankError(self.failure.line, fault))

    def leave_no_silent(self) -> None:
        """End the ranks of this host that are stopped or stuck: nobody else may be there to do so."""
        if self.failure is not None and self.monitor is not None:
            for rank in self.failure.silent:
                self.monitor.processes.kill(rank)

    # -- within -------------------------------------------------------------------------------------------------------

    def _declare(self, failure: Failure) -> None:
        """A failure found here: all others get to know."""
        with self.lock:
            if self.failure is not None or self.ended:
                return
            self.learn(failure)
            self.board.tell(failure.encode())
            if self.courier is not None and not failure.mendable:
                self.courier.tell(failure)

    def _mendable(self, error: BaseException | None) -> bool:
        """Whether the run can be joined anew afterwards. Ranks of several hosts are started again instead."""
        one_host = self.courier is not None and not self.courier.far
        return one_host and (error is None or isinstance(error, Exception))

    def _error(self, failure: Failure) -> RankError:
        self.raised = True
        return RankError(failure.line, failure.rank)

    def _how(self, error: BaseException) -> str:
        return "was interrupted" if isinstance(error, KeyboardInterrupt) else "failed"

    def _place(self) -> str:
        return f" in {self.board.row}" if self.board.row else ""

    def _await_cause(self, error: BaseException) -> None:
        """Errors that are likely to be another's: of a connection, or found by all ranks at once."""
        if isinstance(error, (RuntimeError, OSError)) and "onnection" in str(error):
            self.news.wait(NEWS)
        elif isinstance(error, PenstockError) and self.rank:
            self.news.wait(0.02 + 0.02 * min(self.rank, 20))  # the lowest rank speaks
        self._hear()

    def _hear(self) -> None:
        """What the ranks of this host have told, without waiting for the monitor."""
        for rank, page in self.pages.items():
            if page[Slot.STATE] == State.FAILED:
                self.told(rank)

    def _check_ended(self, peer: int, now: float) -> None:
        """A peer that has ended while somebody waits for it; its last message may still be on its way for a moment."""
        for rank in range(self.size) if peer == EVERYBODY else (peer,):
            if rank != self.rank and self._has_ended(rank):
                since = self.done_since.setdefault(rank, now)
                if now - since > 0.4:
                    self._declare(
                        Failure(rank, f"rank {rank} has ended, but rank {self.rank} waits for it{self._place()}")
                    )

    def _check_together(self) -> None:
        """A rank of this host that has left a run without a flush, where another goes on. It may have been thrown out
        of its loop: then it says so in a moment, and that is the cause."""
        mine = self.board.page
        for rank, page in self.pages.items():
            if beyond(page[Slot.FED], mine[Slot.LEAVING]):
                raise LeftAlone(f"{_left(self.rank)}, but rank {rank} goes on: {SAME}", self.rank)
            if beyond(mine[Slot.FED], page[Slot.LEAVING]) and not self.news.wait(NEWS):
                self._declare(Failure(rank, f"{_left(rank)}, but rank {self.rank} goes on: {SAME}"))

    def _check_alike(self) -> None:
        """A rank of this host that has gone, or waits, in another kind of collective where this one waits: they have
        been called in different orders, and never meet. As above, whoever left a loop lets the cause speak first."""
        number, mine = self.board.page[Slot.COLLECTIVES], self.board.page
        for rank, page in self.pages.items():
            kinds = {self.rank: kind_of(mine, number), rank: kind_of(page.page, number)}
            (a, one), (b, other) = sorted(kinds.items())
            if one is None or other is None or one == other:
                continue
            words = f"rank {a} has come to {_kind(one)} and rank {b} to {_kind(other)} as collective {number}"
            if mine[Slot.LEAVING]:
                raise LeftAlone(f"{_left(self.rank)}, but rank {rank} goes on: {words}; {SAME}", self.rank)
            away = f"{_left(rank)}, but rank {self.rank} goes on: " if page[Slot.LEAVING] else ""
            if not self.news.wait(NEWS):
                self._declare(Failure(rank, f"{away}{words}; {SAME}"))

    def _has_ended(self, rank: int) -> bool:
        if rank in self.pages:
            return self.pages[rank][Slot.STATE] == State.DONE
        return self.courier is not None and self.courier.ended(rank)

    def _parted(self, peer: int) -> Failure:
        """A rank has closed its lanes, which the end of its script does, and may take its time over the rest."""
        left = f"rank {peer} has left the pipeline (its script is over, or has closed it)"
        wanted = "every rank has to take as many batches, and to make the same calls"
        return Failure(peer, f"{left}, but rank {self.rank} waits for it{self._place()}: {wanted}")

    def _unexplained(self, peer: int, error: BaseException) -> Failure:
        """A connection broke and nobody says why: its host is lost, or the rank was the only one there."""
        sights = self.sights()
        if peer == EVERYBODY:
            peer = max(sights, key=lambda rank: sights[rank].beat_age)
            whom = f"another rank, most likely rank {peer}, last heard of {sights[peer].beat_age:.1f} s ago"
        else:
            whom = f"rank {peer}"
        last = f", last {sights[peer].place}" if peer in sights and sights[peer].place else ""
        return Failure(peer, f"rank {self.rank} has lost its connection to {whom}{last}: {one_line(error)}")

    def _time_out(self, peer: int, waited: float) -> None:
        self.news.wait(0.1 * min(self.rank, 10))  # one report is enough
        self._hear()
        with self.lock:
            sights = self.sights()
            failure = blame(self.rank, peer, waited, sights)
            if self.failure is None:
                self.printed = True
                say(f"{failure.line}\n{table(sights, main_stack(), self.rank)}")
                self._declare(failure)

    def sights(self) -> dict[int, Sight]:
        """Every rank, as it looks from here now."""
        own = look(Page(self.board.fd), os.getpid())
        near = {rank: look(page, self.pids[rank]) for rank, page in self.pages.items()}
        far = self.courier.sights() if self.courier is not None else {}
        return {self.rank: own, **near, **far}
