"""The rounds that a reduction is cut into: one bucket of every rank each.

A bucket holds stretches of the flat tensors, one behind the other. Each rank of a host adds up one share of it; on
several hosts, each host then adds up one region of it over the hosts.

    all-reduce        one stretch, in even shares        |  0  |  1  |  2  |
    reduce-scatter    a stretch of each rank's part,     | 0 |   1   |  2  |
    and all-gather    host by host
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNED = 64  # elements; shares that begin at a multiple are added faster

Stretches = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Group:
    """The ranks of a group by host, ascending; hosts in the order of their lowest ranks. `here`: the number of this
    rank's host."""

    hosts: tuple[tuple[int, ...], ...]
    here: int

    @property
    def order(self) -> tuple[int, ...]:
        """The ranks in the order of their parts in a bucket."""
        return tuple(rank for host in self.hosts for rank in host)

    @property
    def near(self) -> tuple[int, ...]:
        """The ranks of this host, the first of which speaks to the other hosts."""
        return self.hosts[self.here]


@dataclass(frozen=True, slots=True)
class Round:
    """`stretches`: of the flat tensors, (start, stop) in elements. The others are places in the bucket: where each
    rank's share, each host's region and, behind the last, the bucket ends. `parts`: where each stretch does."""

    stretches: Stretches
    shares: tuple[int, ...]
    regions: tuple[int, ...]
    parts: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.parts[-1]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """For what lies in the bucket from `start` to `stop`: its place in the bucket, and its stretch in the flat
        tensors."""
        for place, (first, last) in zip(self.parts, self.stretches, strict=False):
            low, high = max(start - place, 0), min(stop - place, last - first)
            if low < high:
                yield place + low, first + low, first + high


def even(group: Group, size: int, most: int) -> list[Round]:
    """For so many elements, of which a bucket holds `most`. One round at least, in which ranks meet."""
    rounds = []
    for start in range(0, max(size, 1), most):
        stop = min(start + most, size)
        shares, regions = _evenly(stop - start, len(group.near)), _evenly(stop - start, len(group.hosts))
        rounds.append(Round(((start, stop),), shares, regions, (0, stop - start)))
    return rounds


def by_part(group: Group, bounds: Sequence[int], most: int) -> list[Round]:
    """For parts between bounds, in the order of the ranks' numbers: a piece of each in every bucket, of equal size as
    long as the part lasts."""
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
