"""The interface of all transports. A lane carries messages in one direction between two stages on different ranks.

Messages of a lane may be received in another order than they were sent; each is received once, by its key. The
schedule, and weights that several stages share, decide which lanes a rank has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, Protocol

import torch

from penstock.core.shape import common_rows


class MessageKey(NamedTuple):
    """The key of a message. `run` counts the calls that run the pipeline (steps, evaluations), the same on every
    rank."""

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
    """The other end was closed in order: its rank sends nothing more, though this one waits for a message."""


@dataclass(slots=True)
class Message:
    """Tensors by the number of the value that they are (or whose gradient they are), and metadata as bytes.

    `stamp` is a check number of the batch that the sender works on; the receiver compares it with its own.
    """

    values: dict[int, torch.Tensor] = field(default_factory=dict)
    metadata: bytes = b""
    stamp: int = 0  # 0 <= stamp < 2**63


class Sender(Protocol):
    """The sending end of a lane."""

    def send(self, key: MessageKey, message: Message) -> None:
        """Send a message, without waiting for the receiver. The caller must not change the tensors in place before the
        step ends."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """The receiving end of a lane."""

    def receive(self, key: MessageKey) -> Message:
        """Wait for a message and return it.

        Its tensors have the shapes, types and (where dense) strides of those sent, and stay valid as long as they are
        referenced. Raises what `Waiting.check` raises.
        """

    def close(self) -> None: ...


class Waiting(Protocol):
    """Failure checks that a transport makes while it waits, at least every 0.2 seconds."""

    def check(self, peer: int, waited: float) -> None:
        """Raise if some rank has failed, if `peer` has ended, or if `waited` seconds are too many."""

    def lost(self, peer: int, error: BaseException) -> Exception:
        """Return the error to raise after the connection to a rank broke; wait a moment for the cause to be
        reported."""


@dataclass
class Lanes:
    """The lane ends that this rank holds."""

    senders: dict[LaneName, Sender]
    receivers: dict[LaneName, Receiver]
    runs: int = 0  # calls that ran the pipeline, the same on every rank: part of each message's key

    def close(self) -> None:
        """Close all lanes. All ranks have to call; everything that was sent still arrives."""
        raise NotImplementedError


def lane_names(
    placement: Sequence[int],
    edges: Iterable[tuple[int, int]],
    ties: Iterable[tuple[int, int]],
    replicas: Sequence[int] = (),
    turns: bool = False,
) -> list[LaneName]:
    """Return every lane between stages of different ranks: both ways along each edge and each tie, between replicas
    that have rows in common; between all, where they take `turns`. `placement` is the rank of each stage's first
    replica."""
    counts = tuple(replicas) or (1,) * len(placement)
    lanes = set()
    for a, b in {*edges, *ties}:
        if placement[a] != placement[b]:
            pairs = [(i, j) for i, j, _ in common_rows(counts[a], counts[b])]
            for i, j in product(range(counts[a]), range(counts[b])) if turns else pairs:
                lanes |= {LaneName(a, b, i, j), LaneName(b, a, j, i)}
    return sorted(lanes)
