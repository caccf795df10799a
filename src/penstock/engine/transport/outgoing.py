"""What is on its way to one peer over gloo.

A send is started by the caller and waited for by a thread: gloo marks a send as done only when somebody waits, and a
wait that runs out of time breaks every connection of its group. The memory lives until the peer has taken it, so what
is kept here is what the schedule has in flight.
"""

from __future__ import annotations

import queue
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.engine.transport.frame import Parcel

FOREVER = timedelta(days=365)
FRAMES, PARTS, NOTHING = 0, 1, 2  # tags; nobody ever sends with the last


class Outgoing:
    """The sending half of the connection to a peer."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.group, self.peer = group, peer
        self.failure: BaseException | None = None
        self._works: queue.SimpleQueue[tuple[dist.Work, torch.Tensor] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def push(self, parcel: Parcel) -> None:
        """Start its transfers. Raises if the connection is broken."""
        if self.failure is not None:
            raise self.failure
        self._start(parcel.frame, FRAMES)
        for part in parcel.parts:
            self._start(part, PARTS)
        if self._thread is None:
            self._thread = threading.Thread(target=self._reap, name=f"penstock-sent-{self.peer}", daemon=True)
            self._thread.start()

    def _start(self, tensor: torch.Tensor, tag: int) -> None:
        self._works.put((self.group.send([tensor], self.peer, tag), tensor))

    def finish(self) -> None:
        """Nothing more will be pushed."""
        self._works.put(None)

    def ended(self, timeout: float) -> bool:
        """Whether all that was pushed is on its way or lost, and the thread gone."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _reap(self) -> None:
        while (item := self._works.get()) is not None:
            try:
                item[0].wait(FOREVER)
            except RuntimeError as error:
                self.failure = error
                return
            del item  # not kept while the next is awaited
