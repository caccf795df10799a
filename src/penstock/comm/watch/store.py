"""News between hosts, through the store: a thread with a connection of its own, so that no waiting rank is in its way.

On a single host the boards tell all, and the courier has nothing to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, sleep

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from penstock.comm.watch.report import Failure, Sight
from penstock.comm.watch.status import State

FAILURE = "failure"  # the key of the first failure
ASK, PUBLISH = 0.3, 1.0  # seconds between two questions, between two reports
LINGER = 3.0  # seconds that rank 0 holds the store longer than it needs it
HASTE = 1.0  # the same in a run that has failed
LOST = 1.5  # seconds without the store after which it counts as gone: more precise news may come first


@dataclass
class _Seen:
    data: bytes = b""
    since: float = 0.0


@dataclass
class Courier:
    """`look` gives this rank's own sight; `heard` takes a failure from elsewhere; `far`: the ranks of other hosts."""

    store: Store
    rank: int
    far: tuple[int, ...]
    look: Callable[[], Sight]
    heard: Callable[[Failure], None]
    agent: bool  # a launcher holds the store; else rank 0 does, and takes it along
    seen: dict[int, _Seen] = field(default_factory=dict)
    outgoing: Failure | None = None
    asked: bool = False  # a failure is known to the store: nothing is left to ask

    def __post_init__(self) -> None:
        self.wake, self.leaving = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="penstock-courier", daemon=True)
        self.thread.start()

    def tell(self, failure: Failure) -> None:
        """Leave word of a failure, at once, without waiting for it."""
        store_is_gone = not self.agent and failure.rank == 0 != self.rank
        if self.far and not store_is_gone:
            self.outgoing = failure
            self.wake.set()

    def sights(self) -> dict[int, Sight]:
        """The ranks of other hosts, as last heard of."""
        now, known = monotonic(), dict(self.seen)
        return {rank: Sight.decode(seen.data, now - seen.since) for rank, seen in known.items() if seen.data}

    def ended(self, rank: int) -> bool:
        seen = self.seen.get(rank)
        return seen is not None and bool(seen.data) and Sight.decode(seen.data, 0.0).state == State.DONE

    def leave(self, seconds: float) -> None:
        """Say the last word and stop."""
        self.leaving.set()
        self.wake.set()
        self.thread.join(seconds)

    def _run(self) -> None:
        published = 0.0
        try:
            while not self.leaving.is_set() and not self.asked and not self._over():
                self.wake.wait(ASK if self.far else None)
                self.wake.clear()
                if self.outgoing is not None:
                    self.store.compare_set(FAILURE, "", self.outgoing.encode().decode())
                    self.asked = True
                if self.far and (self.leaving.is_set() or monotonic() - published >= PUBLISH):
                    self.store.set(f"board/{self.rank}", self.look().encode().decode())
                    self._read_boards()
                    published = monotonic()
                if self.far:
                    self._ask()
            self._linger()
        except (DistError, RuntimeError) as error:
            if self.far and not self.leaving.wait(LOST):
                self._store_is_gone(error)

    def _over(self) -> bool:
        """Rank 0, which holds the store, has ended normally: let it go, and ask no more."""
        if self.agent or not self.ended(0):
            return False
        self.store.set(f"knows/{self.rank}", "")
        return True

    def _linger(self) -> None:
        """Rank 0 holds the store until the ranks of other hosts know that it has ended, or why it will."""
        if self.rank != 0 or self.agent:
            return
        until = monotonic() + (HASTE if self.asked else LINGER)
        while monotonic() < until and not all(self.ended(r) or self.store.check([f"knows/{r}"]) for r in self.far):
            sleep(0.05)
            self._read_boards()

    def _ask(self) -> None:
        if not self.asked and self.store.check([FAILURE]):
            self.asked = True
            self.store.set(f"knows/{self.rank}", "")
            self.heard(Failure.decode(self.store.get(FAILURE)))

    def _read_boards(self) -> None:
        keys = [f"board/{rank}" for rank in self.far]
        if not self.store.check(keys):
            return
        for rank, data in zip(self.far, self.store.multi_get(keys), strict=True):
            seen = self.seen.setdefault(rank, _Seen())
            if data != seen.data:
                seen.data, seen.since = data, monotonic()

    def _store_is_gone(self, error: Exception) -> None:
        """Normal when the ranks of its host have ended; else its process, or their host, is lost."""
        if not (0 in self.far and self.ended(0)):
            words = str(error).split("\n")[0][:200]
            self.heard(Failure(0, f"the store on the host of rank 0 is gone, with rank 0 or its launcher: {words}"))
