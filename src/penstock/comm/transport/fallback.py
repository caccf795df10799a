"""A shared lane with gloo in reserve: a message for which there is no shared memory goes over gloo.

The receiver always looks at the shared lane first. There it finds the message, or the word, which needs no memory,
that it comes elsewhere; so neither end waits for something the other does not send.
"""

from __future__ import annotations

import warnings

from penstock.comm.transport.gloo.mesh import GlooReceiver, GlooSender
from penstock.comm.transport.interface import Key, Message
from penstock.comm.transport.shared.end import Elsewhere
from penstock.comm.transport.shared.receiver import SharedReceiver
from penstock.comm.transport.shared.sender import SharedSender


def warn_slow(error: object, where: str) -> None:
    """Once a process and place."""
    warnings.warn(
        f"expected shared memory {where}, but got: {error}; tensors go over gloo instead, which is slower: free "
        "memory on this host, or allow processes to open each other's memory",
        RuntimeWarning,
        stacklevel=2,
    )


class SharedOrGlooSender:
    """The sending end."""

    def __init__(self, shared: SharedSender, gloo: GlooSender) -> None:
        self.shared, self.gloo, self._warned = shared, gloo, False

    def send(self, key: Key, message: Message) -> None:
        try:
            self.shared.send(key, message)
        except OSError as error:
            if not self._warned:
                self._warned = True
                warn_slow(error, f"for what stage {self.gloo.lane.source} sends to stage {self.gloo.lane.target}")
            self.gloo.send(key, message)
            self.shared.elsewhere(key)

    def close(self) -> None:
        self.shared.close()
        self.gloo.close()


class SharedOrGlooReceiver:
    """The receiving end."""

    def __init__(self, shared: SharedReceiver, gloo: GlooReceiver) -> None:
        self.shared, self.gloo = shared, gloo

    def receive(self, key: Key) -> Message:
        try:
            return self.shared.receive(key)
        except Elsewhere:
            return self.gloo.receive(key)

    def close(self) -> None:
        self.shared.close()
        self.gloo.close()
