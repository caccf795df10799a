"""The division of a reduction into rounds, with one bucket of every rank each.

A bucket holds stretches of the flat tensors, one behind another. Each rank of a host adds up one share of it; on
several hosts, each host then adds up one region of it over the hosts.

    all-reduce        one stretch, in even shares        |  0  |  1  |  2  |
    reduce-scatter    a stretch of each rank's part,     | 0 |   1   |  2  |
    and all-gather    host by host
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNED = 64  # elements; shares that start at a multiple are added faster

Stretches = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Group:
    """The ranks of a group by host, ascending; hosts in the order of their lowest ranks. `here`: the number of this
    rank's host."""

    hosts: tuple[tuple[int, ...], ...]
    here: int

    @property
    def order(self) -> tuple[int, ...]:
        """The order of the ranks' parts in a bucket."""
        return tuple(rank for host in self.hosts for rank in host)

    @property
    def near(self) -> tuple[int, ...]:
        """The ranks of this host; the first exchanges with the other hosts."""
        return self.hosts[self.here]


@dataclass(frozen=True, slots=True)
class Round:
    """One bucket. `stretches`: ranges of the flat tensors, (start, stop) in elements. The others are positions in the
    bucket, with its end: the starts of each rank's share, of each host's region, and (`parts`) of each stretch."""

    stretches: Stretches
    shares: tuple[int, ...]
    regions: tuple[int, ...]
    parts: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.parts[-1]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield, for the range of the bucket from `start` to `stop`, each position in the bucket and its stretch of the
        flat tensors."""
        for place, (first, last) in zip(self.parts, self.stretches, strict=False):
            low, high = max(start - place, 0), min(stop - place, last - first)
            if low < high:
                yield place + low, first + low, first + high


def even(group: Group, size: int, most: int) -> list[Round]:
    """Return the rounds for a number of elements, of which a bucket holds `most`; at least one round, in which the
    ranks synchronize."""
    rounds = []
    for start in range(0, max(size, 1), most):
        stop = min(start + most, size)
        shares, regions = _evenly(stop - start, len(group.near)), _evenly(stop - start, len(group.hosts))
        rounds.append(Round(((start, stop),), shares, regions, (0, stop - start)))
    return rounds


def by_part(group: Group, bounds: Sequence[int], most: int) -> list[Round]:
    """Return the rounds for parts between bounds, in the order of the ranks: every bucket holds a piece of each part,
    of equal size as long as the part lasts."""
    ranks = sorted(group.order)
    numbers = [ranks.index(rank) for rank in group.order]
    piece = most // len(ranks)
    longest = max(bounds[at + 1] - bounds[at] for at in numbers)
    rounds = []
    for begin in range(0, max(longest, 1), piece):
        stretches = tuple(
            (min(bounds[at] + begin, bounds[at + 1]), min(bounds[at] + begin + piece, bounds[at + 1])) for at in numbers
        )
        parts = tuple(accumulate((stop - start for start, stop in stretches), initial=0))
        regions = tuple(parts[at] for at in accumulate(map(len, group.hosts), initial=0))
        shares = parts if len(group.hosts) == 1 else _evenly(parts[-1], len(group.near))
        rounds.append(Round(stretches, shares, regions, parts))
    return rounds


def _evenly(size: int, count: int) -> tuple[int, ...]:
    step = -(-size // (count * ALIGNED)) * ALIGNED
    return tuple(min(at * step, size) for at in range(count + 1))
