"""How a reduction is cut into rounds: one bucket of every rank each.

A bucket holds stretches of the flat tensors, one behind the other; each rank of a host adds up one share of it.

    all-reduce        one stretch, in even shares       |  0  |  1  |  2  |
    reduce-scatter    a stretch of each rank's part,    | 0 |   1   |  2  |
    and all-gather    which is its share
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

ALIGNED = 64  # elements; shares that begin at a multiple are added faster


@dataclass(frozen=True, slots=True)
class Round:
    """`stretches`: of the flat tensors, (start, stop) in elements. `shares`: where in the bucket the share of each rank
    begins, and where the last one ends."""

    stretches: tuple[tuple[int, int], ...]
    shares: tuple[int, ...]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """For what lies in the bucket from `start` to `stop`: its place in the bucket, and its stretch in the flat
        tensors."""
        place = 0
        for first, last in self.stretches:
            low, high = max(start - place, 0), min(stop - place, last - first)
            if low < high:
                yield place + low, first + low, first + high
            place += last - first


def even(size: int, most: int, ranks: int) -> list[Round]:
    """For so many elements, of which a bucket holds `most`. One round at least: ranks meet in it."""
    rounds = []
    for start in range(0, max(size, 1), most):
        stop = min(start + most, size)
        step = -(-(stop - start) // (ranks * ALIGNED)) * ALIGNED
        shares = (min(rank * step, stop - start) for rank in range(ranks + 1))
        rounds.append(Round(((start, stop),), tuple(shares)))
    return rounds


def by_part(bounds: Sequence[int], most: int) -> list[Round]:
    """For parts between bounds: a piece of each in every bucket, of equal size as long as the part lasts."""
    parts = list(pairwise(bounds))
    piece = most // len(parts)
    longest = max(stop - start for start, stop in parts)
    rounds = []
    for begin in range(0, max(longest, 1), piece):
        stretches = tuple((min(start + begin, stop), min(start + begin + piece, stop)) for start, stop in parts)
        shares = accumulate((stop - start for start, stop in stretches), initial=0)
        rounds.append(Round(stretches, tuple(shares)))
    return rounds
