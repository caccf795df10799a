"""The exchange of status and failures between hosts through the store, in a thread with its own connection, so that a
waiting rank does not block it.

On a single host the ranks read each other's status pages, and the thread has nothing to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, sleep

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from penstock.comm.watch.report import Failure, RankStatus
from penstock.comm.watch.status import RankState

FAILURE = "failure"  # the key of the first failure
ASK, PUBLISH = 0.3, 1.0  # seconds between two reads of the store, between two writes
LINGER = 3.0  # seconds that rank 0 keeps the store open for the others
HASTE = 1.0  # the same after a failure
LOST = 1.5  # seconds without the store until it counts as gone, in which a more precise cause may be reported


@dataclass
class _PublishedStatus:
    """The last published status of a rank, and when it was read."""

    data: bytes = b""
    since: float = 0.0


@dataclass
class StatusExchange:
    """The exchange of a rank. `read_status` returns this rank's own status; `receive_failure` is called with a failure
    of another host; `far`: the ranks of other hosts."""

    store: Store
    rank: int
    far: tuple[int, ...]
    read_status: Callable[[], RankStatus]
    receive_failure: Callable[[Failure], None]
    agent: bool  # a launcher holds the store; else rank 0 does, and the store ends with it
    published: dict[int, _PublishedStatus] = field(default_factory=dict)
    outgoing: Failure | None = None
    failure_stored: bool = False  # the store holds a failure: nothing is left to read

    def __post_init__(self) -> None:
        self.wake, self.leaving = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="penstock-status-exchange", daemon=True)
        self.thread.start()

    def publish_failure(self, failure: Failure) -> None:
        """Publish a failure in the background."""
        store_is_gone = not self.agent and failure.rank == 0 != self.rank
        if self.far and not store_is_gone:
            self.outgoing = failure
            self.wake.set()

    def statuses(self) -> dict[int, RankStatus]:
        """Return the last published status of the ranks of other hosts."""
        now, published = monotonic(), dict(self.published)
        return {
            rank: RankStatus.decode(entry.data, now - entry.since) for rank, entry in published.items() if entry.data
        }

    def ended(self, rank: int) -> bool:
        published = self.published.get(rank)
        return (
            published is not None
            and bool(published.data)
            and RankStatus.decode(published.data, 0.0).state == RankState.DONE
        )

    def leave(self, seconds: float) -> None:
        """Publish the last status and stop."""
        self.leaving.set()
        self.wake.set()
        self.thread.join(seconds)

    def _run(self) -> None:
        last_write = 0.0
        try:
            while not self.leaving.is_set() and not self.failure_stored and not self._over():
                self.wake.wait(ASK if self.far else None)
                self.wake.clear()
                if self.outgoing is not None:
                    self.store.compare_set(FAILURE, "", self.outgoing.encode().decode())
                    self.failure_stored = True
                if self.far and (self.leaving.is_set() or monotonic() - last_write >= PUBLISH):
                    self.store.set(f"status/{self.rank}", self.read_status().encode().decode())
                    self._read_statuses()
                    last_write = monotonic()
                if self.far:
                    self._read_failure()
            self._linger()
        except (DistError, RuntimeError) as error:
            if self.far and not self.leaving.wait(LOST):
                self._store_is_gone(error)

    def _over(self) -> bool:
        """Whether rank 0, which holds the store, has ended normally. Acknowledges it, so that rank 0 can close the
        store."""
        if self.agent or not self.ended(0):
            return False
        self.store.set(f"knows/{self.rank}", "")
        return True

    def _linger(self) -> None:
        """Keep the store open on rank 0 until the ranks of other hosts know that it has ended, or why it will."""
        if self.rank != 0 or self.agent:
            return
        until = monotonic() + (HASTE if self.failure_stored else LINGER)
        while monotonic() < until and not all(self.ended(r) or self.store.check([f"knows/{r}"]) for r in self.far):
            sleep(0.05)
            self._read_statuses()

    def _read_failure(self) -> None:
        if not self.failure_stored and self.store.check([FAILURE]):
            self.failure_stored = True
            self.store.set(f"knows/{self.rank}", "")
            self.receive_failure(Failure.decode(self.store.get(FAILURE)))

    def _read_statuses(self) -> None:
        keys = [f"status/{rank}" for rank in self.far]
        if not self.store.check(keys):
            return
        for rank, data in zip(self.far, self.store.multi_get(keys), strict=True):
            entry = self.published.setdefault(rank, _PublishedStatus())
            if data != entry.data:
                entry.data, entry.since = data, monotonic()

    def _store_is_gone(self, error: Exception) -> None:
        """Handle the loss of the store: normal when rank 0 has ended, else its process, launcher or host is lost."""
        if not (0 in self.far and self.ended(0)):
            cause = str(error).split("\n")[0][:200]
            self.receive_failure(
                Failure(0, f"the store on the host of rank 0 is gone, with rank 0 or its launcher: {cause}")
            )
