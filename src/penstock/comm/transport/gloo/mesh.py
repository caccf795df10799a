"""Lanes between ranks over gloo: between hosts, and wherever shared memory cannot be had.

All lanes of a rank share one process group of their own, and one connection to each peer.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.comm.transport.gloo import frame
from penstock.comm.transport.gloo.queues import NOTHING, PIECE, Incoming, Outgoing
from penstock.comm.transport.interface import Key, LaneName, Message, Waiting


class Peer:
    """The connection to one other rank, for all lanes between the two."""

    def __init__(self, group: dist.ProcessGroup, rank: int, waiting: Waiting) -> None:
        self.rank, self.waiting = rank, waiting
        self.outgoing, self.incoming = Outgoing(group, rank), Incoming(group, rank)

    def push(self, parcel: frame.Parcel) -> None:
        try:
            self.outgoing.push(parcel)
        except RuntimeError as error:
            raise self.waiting.lost(self.rank, error) from error

    def wait(self, done: Callable[[float], bool], patient: bool) -> None:
        """`done` waits for some seconds itself. Patient: as long as nobody has failed."""
        began = time.monotonic()
        while not done(PIECE):
            self.waiting.check(self.rank, 0.0 if patient else time.monotonic() - began)

    def await_end(self, patient: bool) -> None:
        """Until all lanes from the peer have ended; then say so. Who hangs up has heard all, or has failed."""
        self.incoming.start()  # where nothing was ever received, the end has still to be
        self.incoming.drain()
        self.wait(self.incoming.closed, patient)
        if self.incoming.lanes:
            failure = self.incoming.failure
            assert failure is not None
            raise self.waiting.lost(self.rank, failure) from failure
        with suppress(RuntimeError):  # it has hung up
            self.outgoing.push(frame.pack_heard())


class GlooMesh:
    """The connections of this rank. To be made by all ranks at once, and closed by all."""

    def __init__(self, waiting: Waiting, timeout: float) -> None:
        """`timeout` (seconds) bounds the meeting of the ranks, not the waiting for messages."""
        self.waiting = waiting
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._process = os.getpid()
        self.peers: dict[int, Peer] = {}
        atexit.register(self.cut)

    def peer(self, rank: int) -> Peer:
        if rank not in self.peers:
            self.peers[rank] = Peer(self._group, rank, self.waiting)
        return self.peers[rank]

    def sender(self, lane: LaneName, peer: int) -> GlooSender:
        return GlooSender(lane, self.peer(peer))

    def receiver(self, lane: LaneName, peer: int) -> GlooReceiver:
        """Have all receivers of a peer before `listen` and before the first `receive`."""
        self.peer(peer).incoming.lanes.add(lane)
        return GlooReceiver(lane, self.peer(peer))

    def listen(self, rank: int) -> None:
        """Receive ahead from a peer, from now on."""
        self.peer(rank).incoming.start()

    def close(self, patient: bool = False) -> None:
        """End once all lanes are closed at both ends, by all ranks. Patient: whenever the others come to it."""
        try:
            for peer in self.peers.values():
                peer.await_end(patient)
            for peer in self.peers.values():
                peer.outgoing.finish()
                peer.wait(peer.incoming.ended, patient)
                peer.wait(peer.outgoing.ended, patient)
        except BaseException:
            self.cut()
            raise
        atexit.unregister(self.cut)
        dist.destroy_process_group(self._group)

    def cut(self) -> None:
        """Break all connections at once, after a failure: peers learn of it, and this rank's threads come back.

        Python ends with an abort when a thread is still inside gloo. A wait that runs out of time closes every
        connection of its group, which is what brings them back.
        """
        atexit.unregister(self.cut)
        if os.getpid() != self._process:
            return  # a forked child has neither the threads nor a right to the connections
        for peer in self.peers.values():
            peer.outgoing.finish()
            peer.incoming.drain()
        nowhere = torch.empty(1, dtype=torch.uint8, device="cpu")
        for rank in self.peers:
            with suppress(RuntimeError):
                self._group.recv([nowhere], rank, NOTHING).wait(timedelta(milliseconds=1))
        for peer in self.peers.values():
            peer.outgoing.ended(PIECE)
            peer.incoming.ended(PIECE)


class GlooSender:
    """The sending end of a lane."""

    def __init__(self, lane: LaneName, peer: Peer) -> None:
        self.lane, self._peer = lane, peer

    def send(self, key: Key, message: Message) -> None:
        self._peer.push(frame.pack(self.lane, key, message))

    def close(self) -> None:
        """Everything sent before still arrives."""
        self._peer.push(frame.pack_end(self.lane))


class GlooReceiver:
    """The receiving end of a lane."""

    def __init__(self, lane: LaneName, peer: Peer) -> None:
        self.lane, self._peer = lane, peer

    def there(self, key: Key) -> bool:
        """Whether a message has come already."""
        return self._peer.incoming.there(self.lane, key)

    def receive(self, key: Key) -> Message:
        return self._peer.incoming.take(self.lane, key, self._peer.waiting)

    def close(self) -> None:
        """The end is awaited when the mesh is closed."""
