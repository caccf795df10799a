"""A shared-memory lane with a gloo lane as fallback, for messages for which there is no shared memory.

The receiver always reads the shared lane first. There it finds the message, or a note, which needs no memory, that the
message was sent over gloo. So both ends always use the same lane.
"""

from __future__ import annotations

import warnings

from penstock.comm.transport.gloo.mesh import GlooReceiver, GlooSender
from penstock.comm.transport.interface import Message, MessageKey
from penstock.comm.transport.shared.end import SentElsewhere
from penstock.comm.transport.shared.receiver import SharedReceiver
from penstock.comm.transport.shared.sender import SharedSender


def warn_slow(error: object, where: str) -> None:
    """Warn, once for each process and place, that tensors go over gloo."""
    warnings.warn(
        f"expected shared memory {where}, but got: {error}; tensors go over gloo instead, which is slower: free "
        "memory on this host, or allow processes to open each other's memory",
        RuntimeWarning,
        stacklevel=2,
    )


class SharedOrGlooSender:
    """The sending end of the lane."""

    def __init__(self, shared: SharedSender, gloo: GlooSender) -> None:
        self.shared, self.gloo, self._warned = shared, gloo, False

    def send(self, key: MessageKey, message: Message) -> None:
        try:
            self.shared.send(key, message)
        except OSError as error:
            if not self._warned:
                self._warned = True
                warn_slow(error, f"for what stage {self.gloo.lane.source} sends to stage {self.gloo.lane.target}")
            self.gloo.send(key, message)
            self.shared.send_elsewhere(key)

    def close(self) -> None:
        self.shared.close()
        self.gloo.close()


class SharedOrGlooReceiver:
    """The receiving end of the lane."""

    def __init__(self, shared: SharedReceiver, gloo: GlooReceiver) -> None:
        self.shared, self.gloo = shared, gloo

    def receive(self, key: MessageKey) -> Message:
        try:
            return self.shared.receive(key)
        except SentElsewhere:
            return self.gloo.receive(key)

    def close(self) -> None:
        self.shared.close()
        self.gloo.close()
