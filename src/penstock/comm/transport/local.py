"""A lane between two stages of one process: messages are kept until they are received."""

from __future__ import annotations

from penstock.comm.transport.interface import LaneName, Message, MessageKey
from penstock.errors import PenstockError


class LocalLane:
    """Both ends of the lane."""

    def __init__(self, lane: LaneName) -> None:
        self.lane = lane
        self._sent: dict[MessageKey, Message] = {}

    def send(self, key: MessageKey, message: Message) -> None:
        values = {
            number: tensor.detach() for number, tensor in message.values.items()
        }  # without the graph, as from another process
        self._sent[key] = Message(values, message.metadata, message.stamp)

    def has(self, key: MessageKey) -> bool:
        """Return whether a message has been sent."""
        return key in self._sent

    def receive(self, key: MessageKey) -> Message:
        """Does not wait: who would send it in the meantime?"""
        if key not in self._sent:
            raise PenstockError(
                f"expected the message of run {key.run}, micro-batch {key.microbatch} to be sent from stage "
                f"{self.lane.source} before stage {self.lane.target} asks for it, but it was not"
            )
        return self._sent.pop(key)

    def close(self) -> None:
        self._sent.clear()
