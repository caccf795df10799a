"""A lane between two stages of one process: what is sent lies there until it is asked for."""

from __future__ import annotations

from penstock.comm.transport.interface import Key, LaneName, Message
from penstock.errors import PenstockError


class Local:
    """Both ends of the lane."""

    def __init__(self, lane: LaneName) -> None:
        self.lane = lane
        self._there: dict[Key, Message] = {}

    def send(self, key: Key, message: Message) -> None:
        values = {number: tensor.detach() for number, tensor in message.values.items()}  # as from another process
        self._there[key] = Message(values, message.told, message.stamp)

    def has(self, key: Key) -> bool:
        """Return whether a message has been sent."""
        return key in self._there

    def receive(self, key: Key) -> Message:
        """Does not wait: who would send it in the meantime?"""
        if key not in self._there:
            raise PenstockError(
                f"expected the message of run {key.run}, micro-batch {key.microbatch} to be sent from stage "
                f"{self.lane.source} before stage {self.lane.target} asks for it, but it was not"
            )
        return self._there.pop(key)

    def close(self) -> None:
        self._there.clear()
