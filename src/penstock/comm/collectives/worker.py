"""The thread of a reducer: it runs reductions one after another while the main thread computes.

It ends when another rank has failed. Its owner has to stop it before the interpreter ends, when it must not be in
native code.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from time import monotonic, perf_counter_ns

from torch import Tensor

from penstock.comm.transport.interface import Waiting

PIECE = 0.2  # seconds between two checks of the other ranks

Work = Callable[[], list[Tensor]]


class Stopped(Exception):
    """The thread was stopped during its work."""


class Worker:
    """The thread. `rank`: this rank. `waits_for`: the rank for which the thread is waiting."""

    def __init__(self, rank: int, watch: Waiting) -> None:
        self.rank, self.watch = rank, watch
        self.waits_for: int | None = None
        self.progress = 0  # number of waits that have ended
        self.failure: BaseException | None = None
        self._stopping = False
        self._tasks: queue.SimpleQueue[tuple[Work, Reduction] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> Reduction:
        task = Reduction(self)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="penstock-reduce", daemon=True)
            self._thread.start()
        self._tasks.put((work, task))
        return task

    def wait(self, peers: tuple[int, ...], over: Callable[[float], bool]) -> None:
        """Wait, in the thread, until `over`, which itself waits for some seconds. Raises if a rank has failed."""
        self.waits_for = peers[0]
        while not over(PIECE):
            if self._stopping:
                raise Stopped
            for peer in peers:
                self.watch.check(peer, 0.0)  # the time-out is checked by the thread that waits for the result
        self.waits_for = None
        self.progress += 1

    def stop(self) -> None:
        """Cancel the current work, and return when the thread has ended."""
        self._stopping = True
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            work, task = item
            try:
                if self.failure is None:
                    task.results = work()
            except BaseException as error:
                self.failure = error
            task.failure = self.failure  # after a failure, the ranks are no longer synchronized
            task.ended = perf_counter_ns()
            task.over.set()
            del item, work, task  # release the tensors while waiting for the next


class Reduction:
    """A started reduction: a `Pending`."""

    def __init__(self, worker: Worker) -> None:
        self.over = threading.Event()
        self.ended = 0
        self.results: list[Tensor] = []
        self.failure: BaseException | None = None
        self._worker = worker

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> list[Tensor]:
        worker, progress, began = self._worker, -1, monotonic()
        while not self.over.wait(PIECE):
            if worker.progress != progress:
                progress, began = worker.progress, monotonic()
            peer = worker.waits_for
            worker.watch.check(worker.rank if peer is None else peer, monotonic() - began)
        if self.failure is not None:
            raise self.failure
        return self.results
