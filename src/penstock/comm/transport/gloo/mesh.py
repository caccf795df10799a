"""Lanes between ranks over gloo, between hosts and wherever shared memory is not available.

All lanes of a rank share one separate process group, with one connection to each peer.
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
from penstock.comm.transport.gloo.queues import NOTHING, POLL, Incoming, Outgoing
from penstock.comm.transport.interface import LaneName, Message, MessageKey, Waiting


class Peer:
    """The connection to one other rank, for all lanes between the two."""

    def __init__(self, group: dist.ProcessGroup, rank: int, waiting: Waiting) -> None:
        self.rank, self.waiting = rank, waiting
        self.outgoing, self.incoming = Outgoing(group, rank), Incoming(group, rank)

    def push(self, packed: frame.PackedMessage) -> None:
        try:
            self.outgoing.push(packed)
        except RuntimeError as error:
            raise self.waiting.lost(self.rank, error) from error

    def wait(self, done: Callable[[float], bool], patient: bool) -> None:
        """Wait until `done`, which itself waits for the seconds that it is given. `patient`: without a time-out."""
        began = time.monotonic()
        while not done(POLL):
            self.waiting.check(self.rank, 0.0 if patient else time.monotonic() - began)

    def await_end(self, patient: bool) -> None:
        """Wait until all lanes from the peer have ended, then confirm it. A peer that disconnects before has failed."""
        self.incoming.start()  # even where no message was received, the end has to be
        self.incoming.drain()
        self.wait(self.incoming.closed, patient)
        if self.incoming.lanes:
            failure = self.incoming.failure
            assert failure is not None
            raise self.waiting.lost(self.rank, failure) from failure
        with suppress(RuntimeError):  # it has disconnected
            self.outgoing.push(frame.pack_end_received())


class GlooMesh:
    """The connections of this rank. All ranks have to create and close it together."""

    def __init__(self, waiting: Waiting, timeout: float) -> None:
        """`timeout` (seconds) limits the time to connect, not the time to wait for messages."""
        self.waiting = waiting
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._process = os.getpid()
        self.peers: dict[int, Peer] = {}
        atexit.register(self.abort)

    def peer(self, rank: int) -> Peer:
        if rank not in self.peers:
            self.peers[rank] = Peer(self._group, rank, self.waiting)
        return self.peers[rank]

    def sender(self, lane: LaneName, peer: int) -> GlooSender:
        return GlooSender(lane, self.peer(peer))

    def receiver(self, lane: LaneName, peer: int) -> GlooReceiver:
        """Return the receiving end of a lane. Create all receivers of a peer before `listen` and the first
        `receive`."""
        self.peer(peer).incoming.lanes.add(lane)
        return GlooReceiver(lane, self.peer(peer))

    def listen(self, rank: int) -> None:
        """Start to receive from a peer, ahead of need."""
        self.peer(rank).incoming.start()

    def close(self, patient: bool = False) -> None:
        """Close the connections after all lanes were closed at both ends. All ranks have to call. `patient`: without a
        time-out."""
        try:
            for peer in self.peers.values():
                peer.await_end(patient)
            for peer in self.peers.values():
                peer.outgoing.finish()
                peer.wait(peer.incoming.ended, patient)
                peer.wait(peer.outgoing.ended, patient)
        except BaseException:
            self.abort()
            raise
        atexit.unregister(self.abort)
        dist.destroy_process_group(self._group)

    def abort(self) -> None:
        """Break all connections after a failure, so that peers notice it and this rank's threads return.

        Python aborts at its end when a thread is still inside gloo. A wait that times out closes every connection of
        its group, and so the threads return.
        """
        atexit.unregister(self.abort)
        if os.getpid() != self._process:
            return  # a forked child has no threads, and must not use the connections
        for peer in self.peers.values():
            peer.outgoing.finish()
            peer.incoming.drain()
        unused = torch.empty(1, dtype=torch.uint8, device="cpu")
        for rank in self.peers:
            with suppress(RuntimeError):
                self._group.recv([unused], rank, NOTHING).wait(timedelta(milliseconds=1))
        for peer in self.peers.values():
            peer.outgoing.ended(POLL)
            peer.incoming.ended(POLL)


class GlooSender:
    """The sending end of a lane."""

    def __init__(self, lane: LaneName, peer: Peer) -> None:
        self.lane, self._peer = lane, peer

    def send(self, key: MessageKey, message: Message) -> None:
        self._peer.push(frame.pack(self.lane, key, message))

    def close(self) -> None:
        """End the lane. Everything sent before still arrives."""
        self._peer.push(frame.pack_end(self.lane))


class GlooReceiver:
    """The receiving end of a lane."""

    def __init__(self, lane: LaneName, peer: Peer) -> None:
        self.lane, self._peer = lane, peer

    def has_arrived(self, key: MessageKey) -> bool:
        """Whether a message has arrived."""
        return self._peer.incoming.has_arrived(self.lane, key)

    def receive(self, key: MessageKey) -> Message:
        return self._peer.incoming.take(self.lane, key, self._peer.waiting)

    def close(self) -> None:
        """Do nothing: the end is awaited when the mesh is closed."""
