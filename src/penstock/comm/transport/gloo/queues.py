"""The threads that send to and receive from one peer over gloo.

The caller starts a send, and a thread waits for it: gloo marks a send as done only when somebody waits for it, and a
wait that times out breaks every connection of its group. A receive can neither be polled nor cancelled, so one thread
for each peer receives ahead of need, and sorts messages by lane and key.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.comm.transport.gloo import frame
from penstock.comm.transport.gloo.frame import PackedMessage
from penstock.comm.transport.interface import ClosedLane, LaneName, Message, MessageKey, Waiting

FOREVER = timedelta(days=365)
FRAMES, PARTS, NOTHING = 0, 1, 2  # tags; nothing is ever sent with the last


class Outgoing:
    """The sending half of the connection to a peer."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.group, self.peer = group, peer
        self.failure: BaseException | None = None
        self._works: queue.SimpleQueue[tuple[dist.Work, torch.Tensor] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def push(self, packed: PackedMessage) -> None:
        """Start the transfers of a message. Raises if the connection is broken."""
        if self.failure is not None:
            raise self.failure
        self._start(packed.frame, FRAMES)
        for part in packed.parts:
            self._start(part, PARTS)
        if self._thread is None:
            self._thread = threading.Thread(target=self._await_sends, name=f"penstock-sent-{self.peer}", daemon=True)
            self._thread.start()

    def _start(self, tensor: torch.Tensor, tag: int) -> None:
        self._works.put((self.group.send([tensor], self.peer, tag), tensor))

    def finish(self) -> None:
        """End the thread once all transfers are done."""
        self._works.put(None)

    def ended(self, timeout: float) -> bool:
        """Whether all transfers are done or failed, and the thread has ended."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _await_sends(self) -> None:
        while (item := self._works.get()) is not None:
            try:
                item[0].wait(FOREVER)
            except RuntimeError as error:
                self.failure = error
                return
            del item  # release the tensor while waiting for the next


POSTED = 4  # frames
AHEAD_BYTES = 2**25  # beyond this, more is received only while a caller waits for a message that has not arrived
POLL = 0.2  # seconds between two checks of the other ranks


class Incoming:
    """The receiving half of the connection to a peer."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.group, self.peer = group, peer
        self.lanes: set[LaneName] = set()  # lanes that have not ended
        self.end_received = False  # the peer has received the end of all lanes to it
        self._changed = threading.Condition()
        self._arrived: dict[tuple[LaneName, MessageKey], frame.ReceivedFrame] = {}
        self._ahead = 0  # bytes in `_arrived`
        self._waiters = 0
        self._draining = False
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to receive, until all lanes have ended at both ends."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"penstock-from-{self.peer}", daemon=True)
            self._thread.start()

    def has_arrived(self, lane: LaneName, key: MessageKey) -> bool:
        """Whether a message has arrived."""
        return (lane, key) in self._arrived

    def take(self, lane: LaneName, key: MessageKey, waiting: Waiting) -> Message:
        """Wait for a message and return it."""
        self.start()
        began = time.monotonic()
        while True:
            with self._changed:
                if (message := self._poll(lane, key)) is not None:
                    return message
                failure = self.failure
                if failure is None and lane not in self.lanes:
                    failure = ClosedLane(f"it closed the lane from stage {lane.source} to stage {lane.target}")
            if failure is not None:
                raise waiting.lost(self.peer, failure) from failure
            waiting.check(self.peer, time.monotonic() - began)

    def _poll(self, lane: LaneName, key: MessageKey) -> Message | None:
        """Return the message if it arrives within POLL seconds, else None."""
        if (lane, key) not in self._arrived:
            self._waiters += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(
                    lambda: (lane, key) in self._arrived or lane not in self.lanes or self.failure is not None, POLL
                )
            finally:  # also after Ctrl-C
                self._waiters -= 1
        if (arrived := self._arrived.pop((lane, key), None)) is None:
            return None
        self._ahead -= arrived.size
        self._changed.notify_all()
        return arrived.message

    def closed(self, timeout: float) -> bool:
        """Whether every lane from the peer has ended or the connection has failed."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.lanes or self.failure is not None, timeout)

    def drain(self) -> None:
        """Receive the remaining messages without limit, so that the peer can end."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    def ended(self, timeout: float) -> bool:
        """Whether the thread has ended."""
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
        while self.lanes or not self.end_received:
            memory, work = posted.popleft()
            work.wait(FOREVER)
            posted.append(self._post(frame.FRAME_BYTES, FRAMES))
            arrived = frame.read(memory, self._fetch)
            with self._changed:
                self._sort(arrived)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ahead <= AHEAD_BYTES or self._waiters or self._draining)
            del memory, work, arrived  # release the memory while waiting for the next

    def _sort(self, arrived: frame.ReceivedFrame) -> None:
        if arrived.kind == frame.END:
            self.lanes.discard(arrived.lane)
        elif arrived.kind == frame.END_RECEIVED:
            self.end_received = True
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
