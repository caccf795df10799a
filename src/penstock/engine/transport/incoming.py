"""What comes from one peer over gloo: a thread receives ahead of need and sorts by lane and key.

One thread a peer, because a gloo receive can neither be polled nor be given up: this one waits without a limit,
survives the peer's death, and keeps the reason.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import torch
import torch.distributed as dist

from penstock.engine.transport import frame
from penstock.engine.transport.lane import ClosedLane, Key, LaneName, Message, Waiting
from penstock.engine.transport.outgoing import FOREVER, FRAMES, PARTS

POSTED = 4  # frames
AHEAD_BYTES = 2**25  # more than this is received ahead only while somebody waits for what has not come
PIECE = 0.2  # seconds between two looks at the other ranks


class Incoming:
    """The receiving half of the connection to a peer."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.group, self.peer = group, peer
        self.lanes: set[LaneName] = set()  # that have not ended
        self.heard = False  # the peer has got the end of all lanes to it
        self._changed = threading.Condition()
        self._arrived: dict[tuple[LaneName, Key], frame.Arrived] = {}
        self._ahead = 0  # bytes in `_arrived`
        self._waiters = 0
        self._draining = False
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Receive from now on, until all lanes have ended at both ends."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"penstock-from-{self.peer}", daemon=True)
            self._thread.start()

    def there(self, lane: LaneName, key: Key) -> bool:
        """Whether a message has come."""
        return (lane, key) in self._arrived

    def take(self, lane: LaneName, key: Key, waiting: Waiting) -> Message:
        """Wait for a message."""
        self.start()
        began = time.monotonic()
        while True:
            with self._changed:
                if (message := self._found(lane, key)) is not None:
                    return message
                failure = self.failure
                if failure is None and lane not in self.lanes:
                    failure = ClosedLane(f"it closed the lane from stage {lane.source} to stage {lane.target}")
            if failure is not None:
                raise waiting.lost(self.peer, failure) from failure
            waiting.check(self.peer, time.monotonic() - began)

    def _found(self, lane: LaneName, key: Key) -> Message | None:
        """The message, if it comes within a moment."""
        if (lane, key) not in self._arrived:
            self._waiters += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(
                    lambda: (lane, key) in self._arrived or lane not in self.lanes or self.failure is not None, PIECE
                )
            finally:  # Ctrl-C comes here
                self._waiters -= 1
        if (found := self._arrived.pop((lane, key), None)) is None:
            return None
        self._ahead -= found.size
        self._changed.notify_all()
        return found.message

    def closed(self, timeout: float) -> bool:
        """Whether every lane from the peer has ended, or will never."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.lanes or self.failure is not None, timeout)

    def drain(self) -> None:
        """Receive the rest, though nobody wants it, so that the peer can end."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    def ended(self, timeout: float) -> bool:
        """Whether the thread is gone."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._read_all()
        except Exception as error:
            with self._changed:
                self.failure = error
                self._changed.notify_all()

    def _read_all(self) -> None:
        posted = deque(self._post(frame.FRAME_BYTES, FRAMES) for _ in range(POSTED))
        while self.lanes or not self.heard:
            memory, work = posted.popleft()
            work.wait(FOREVER)
            posted.append(self._post(frame.FRAME_BYTES, FRAMES))
            arrived = frame.read(memory, self._fetch)
            with self._changed:
                self._sort(arrived)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ahead <= AHEAD_BYTES or self._waiters or self._draining)
            del memory, work, arrived  # not kept while the next is awaited

    def _sort(self, arrived: frame.Arrived) -> None:
        if arrived.kind == frame.END:
            self.lanes.discard(arrived.lane)
        elif arrived.kind == frame.HEARD:
            self.heard = True
        else:
            self._arrived[arrived.lane, arrived.key] = arrived
            self._ahead += arrived.size

    def _post(self, size: int, tag: int) -> tuple[torch.Tensor, dist.Work]:
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return memory, self.group.recv([memory], self.peer, tag)

    def _fetch(self, size: int, stretches: list[tuple[int, int]]) -> torch.Tensor:
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        works = [self.group.recv([memory[at : at + length]], self.peer, PARTS) for at, length in stretches]
        for work in works:
            work.wait(FOREVER)
        return memory
