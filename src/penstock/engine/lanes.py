"""The lanes of one rank: which there are follows from the schedule and from weights that several stages share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.engine.transport.lane import LaneName, Receiver, Sender


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
    placement: tuple[int, ...], edges: Iterable[tuple[int, int]], ties: Iterable[tuple[int, int]]
) -> list[LaneName]:
    """Every lane between stages of different ranks: both ways along each edge and each tie."""
    pairs = {*edges, *ties}
    both = {pair for a, b in pairs for pair in ((a, b), (b, a))}
    return sorted(LaneName(a, b) for a, b in both if placement[a] != placement[b])
