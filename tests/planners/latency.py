"""DAPPLE's latency of a synchronous step: L = Tw + Ts + Te, over a list in which each transfer is a stage of its own.

Tw, the warm-up, is the first forward down to the pivot Q; Ts, the steady phase, is M - 1 more pairs on Q; Te, the end,
is the last backward up from Q and the all-reduces that hide behind it or do not. The pivot is the stage with the fewest
gaps: going back from the last stage, s takes over if its steady phase outlasts Q's and the way there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Latency:
    warm_up: float
    steady: float
    end: float
    pivot: int  # in the extended list: stage s is entry 2s, the transfer after it 2s + 1

    @property
    def total(self) -> float:
        return self.warm_up + self.steady + self.end


def latency(forward: Sequence[float], backward: Sequence[float], reduce: Sequence[float], microbatches: int) -> Latency:
    """L of an extended list: stages and the transfers between them, whose `reduce` is 0."""
    more, last = microbatches - 1, len(forward) - 1
    pair = [f + b for f, b in zip(forward, backward, strict=True)]
    pivot = last
    for s in range(last - 1, -1, -1):
        if more * pair[s] > more * pair[pivot] + sum(pair[s + 1 : pivot + 1]):
            pivot = s
    ends = []
    for s, seconds in enumerate(reduce):
        away = sum(backward[s : pivot + 1]) if s <= pivot else -sum(backward[pivot : s + 1])
        ends.append(seconds + away)
    return Latency(sum(forward[: pivot + 1]), more * pair[pivot], max(ends), pivot)
