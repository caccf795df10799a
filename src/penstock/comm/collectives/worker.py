"""The thread of a reducer: it does what was started, one after the other, while the main thread computes.

It ends by itself when another rank has failed. So that it is never in native code when the interpreter ends, whoever
made it has to stop it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from time import monotonic, perf_counter_ns

from torch import Tensor

from penstock.comm.transport.interface import Waiting

PIECE = 0.2  # seconds between two looks at the other ranks

Work = Callable[[], list[Tensor]]


class Stopped(Exception):
    """The thread was told to stop amid its work."""


class Worker:
    """`rank`: this one. `waits_for`: the rank that the thread waits for now."""

    def __init__(self, rank: int, watch: Waiting) -> None:
        self.rank, self.watch = rank, watch
        self.waits_for: int | None = None
        self.progress = 0  # waits that are over
        self.failure: BaseException | None = None
        self._stopping = False
        self._tasks: queue.SimpleQueue[tuple[Work, Task] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> Task:
        task = Task(self)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="penstock-reduce", daemon=True)
            self._thread.start()
        self._tasks.put((work, task))
        return task

    def wait(self, peers: tuple[int, ...], over: Callable[[float], bool]) -> None:
        """Called in the thread: until `over`, which waits for some seconds itself. Raises if a rank has failed."""
        self.waits_for = peers[0]
        while not over(PIECE):
            if self._stopping:
                raise Stopped
            for peer in peers:
                self.watch.check(peer, 0.0)  # how long is too long counts for who waits for the result
        self.waits_for = None
        self.progress += 1

    def stop(self) -> None:
        """Give up what is under way, and come back when the thread has ended."""
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
            task.failure = self.failure  # after one, the ranks are no longer at the same place
            task.ended = perf_counter_ns()
            task.over.set()
            del item, work, task  # their tensors are not kept while the next are awaited


class Task:
    """A reduction that was started: a `Pending`."""

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
