"""The interface of all transports: a lane is one direction between two stages that live on different ranks.

Messages of a lane may be asked for in another order than they were sent in; each is asked for once, by its key. Which
lanes a rank has follows from the schedule and from weights that several stages share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from penstock.core.shape import common_rows


class Key(NamedTuple):
    """Which message: `run` counts the calls that run the pipeline (steps, evaluations), the same on every rank."""

    run: int
    microbatch: int


class LaneName(NamedTuple):
    """The stages it leads from and to, and which replica of each. Activations go to a later stage, gradients to an
    earlier one."""

    source: int
    target: int
    source_replica: int = 0
    target_replica: int = 0


class ClosedLane(ConnectionError):
    """The other end was closed, in order: its rank has nothing more to send, though this one waits for it."""


@dataclass(slots=True)
class Message:
    """Tensors by the number of the value they are (or whose gradient they are), and plain words that go with them.

    `stamp` is a check number that both ends must agree on: of the batch that the sender works on.
    """

    values: dict[int, torch.Tensor] = field(default_factory=dict)
    told: bytes = b""
    stamp: int = 0  # 0 <= stamp < 2**63


class Sender(Protocol):
    """The sending end of a lane."""

    def send(self, key: Key, message: Message) -> None:
        """Hand over. Does not wait for the receiver; afterwards the caller may do with the tensors what it likes,
        except change them in place: that is for after the step."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """The receiving end of a lane."""

    def receive(self, key: Key) -> Message:
        """Wait for a message. Its tensors have the shapes, strides (where dense) and types of those sent, and stay
        valid as long as anybody holds them. Raises what `Waiting.check` raises."""

    def close(self) -> None: ...


class Waiting(Protocol):
    """What a transport asks while it waits, at least every 0.2 seconds."""

    def check(self, peer: int, waited: float) -> None:
        """Raise if some rank has failed, if `peer` has ended, or if `waited` seconds are too many."""

    def lost(self, peer: int, error: BaseException) -> Exception:
        """The connection to a rank broke: find out why (waiting a moment for news), and return what to raise."""


@dataclass
class Lanes:
    """The ends of lanes that this rank holds."""

    senders: dict[LaneName, Sender]
    receivers: dict[LaneName, Receiver]
    runs: int = 0  # calls that ran the pipeline, the same on every rank: messages of different ones cannot be mixed up

    def close(self) -> None:
        """By all ranks together: everything that was sent still arrives."""
        raise NotImplementedError


def lane_names(
    placement: Sequence[int],
    edges: Iterable[tuple[int, int]],
    ties: Iterable[tuple[int, int]],
    replicas: Sequence[int] = (),
) -> list[LaneName]:
    """Return every lane between stages of different ranks: both ways along each edge and each tie, between replicas
    that have rows in common. `placement` is the rank of each stage's first replica."""
    counts = tuple(replicas) or (1,) * len(placement)
    lanes = set()
    for a, b in {*edges, *ties}:
        if placement[a] != placement[b]:
            for i, j, _ in common_rows(counts[a], counts[b]):
                lanes |= {LaneName(a, b, i, j), LaneName(b, a, j, i)}
    return sorted(lanes)
